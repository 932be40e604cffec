"""`lockstep bench serve`: a closed loop of N clients against any OpenAI-compatible server."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from clients.api import DEFAULT_URL, LockstepClient
from clients.bench_report import Trace, summarize
from clients.errors import ClientError
from clients.progress import Advance, progress
from clients.workload import Workload

Clock = Callable[[], float]
HEALTH_INTERVAL_S = 0.05


async def measure(
    client: LockstepClient, prompt: list[int], *, model: str, output_len: int, clock: Clock = time.perf_counter
) -> Trace:
    """What one request saw, its failure included: exactly `output_len` greedy tokens after `prompt` are asked for."""
    t_start = clock()
    t_pieces: list[float] = []
    usage: dict[str, int] = {}
    error = None
    chunks = client.stream_complete(
        prompt,
        model=model,
        max_tokens=output_len,
        min_tokens=output_len,
        ignore_eos=True,
        temperature=0,
        stream_options={"include_usage": True},
    )
    try:
        async for chunk in chunks:
            if any(choice.get("text") for choice in chunk["choices"]):
                t_pieces.append(clock())
            usage = chunk.get("usage") or usage
    except ClientError as refused:
        error = str(refused)
    return Trace(
        t_start=t_start,
        t_pieces=tuple(t_pieces),
        num_prompt=usage.get("prompt_tokens", len(prompt)),
        num_output=usage.get("completion_tokens", len(t_pieces)),
        error=error or (None if t_pieces else "no text came"),
    )


async def closed_loop(
    client: LockstepClient, workload: Workload, *, model: str, num_clients: int, advance: Advance
) -> list[Trace]:
    """One trace per prompt. Each client sends its next request as soon as its last one has been answered."""
    prompts = iter(workload.prompts())
    traces: list[Trace] = []

    async def one_client() -> None:
        for prompt in prompts:
            traces.append(await measure(client, prompt, model=model, output_len=workload.output_len))
            advance(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(one_client())
    return traces


async def poll_health(client: LockstepClient, latencies_s: list[float], clock: Clock = time.perf_counter) -> None:
    """Ask after the server's health again and again, and add how long each answer took, until cancelled."""
    while True:
        t_start = clock()
        with contextlib.suppress(ClientError):  # a server that is gone fails the requests, and they say why
            await client.health()
            latencies_s.append(clock() - t_start)
        await asyncio.sleep(HEALTH_INTERVAL_S)


async def run(
    url: str,
    api_key: str | None,
    model: str | None,
    workload: Workload,
    *,
    num_clients: int,
    num_warmups: int,
    polls_health: bool = False,
) -> dict[str, Any]:
    """Warm up, run the workload, print the table, and return what `--save-result` writes. Raises `ClientError`."""
    async with LockstepClient(url, api_key) as client:
        name = model or await client.default_model()
        for prompt in workload.prompts()[:num_warmups]:
            # Reversed, so that what is measured later finds nothing of it cached.
            trace = await measure(client, prompt[::-1], model=name, output_len=workload.output_len)
            if trace.error is not None:
                raise ClientError(f"warm-up failed: {trace.error}")
        at_once = min(num_clients, workload.num_prompts)
        with progress(f"{workload.num_prompts} requests, {at_once} at a time", workload.num_prompts) as advance:
            health_s: list[float] = []
            async with asyncio.TaskGroup() as group:
                polling = group.create_task(poll_health(client, health_s)) if polls_health else None
                t_start = time.perf_counter()
                traces = await closed_loop(client, workload, model=name, num_clients=num_clients, advance=advance)
                duration_s = time.perf_counter() - t_start
                if polling is not None:
                    polling.cancel()
    summary = summarize(traces, duration_s=duration_s, max_concurrency=num_clients, health_s=health_s)
    click.echo(summary.to_text())
    errors = [trace.error or "" for trace in traces]
    for error in sorted(set(filter(None, errors))):
        click.echo(f"{errors.count(error)} failed: {error}", err=True)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "base_url": client.base_url,
        "model_id": name,
        "num_prompts": workload.num_prompts,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "seed": workload.seed,
        **summary.to_json(),
        "input_lens": [trace.num_prompt for trace in traces],
        "output_lens": [trace.num_output for trace in traces],
        "ttfts": [trace.ttft_s if trace.t_pieces else None for trace in traces],
        "itls": [trace.itls_s for trace in traces],
        "errors": errors,
    }


@click.command("serve")
@click.option("--url", default=DEFAULT_URL, envvar="LOCKSTEP_URL", show_default=True, help="Address of the server.")
@click.option("--api-key", envvar="LOCKSTEP_API_KEY", help="Key the server asks for.")
@click.option("--model", help="Name of the model.  [default: the server's first]")
@click.option(
    "--clients", "num_clients", type=click.IntRange(1), default=8, show_default=True, help="Requests at once."
)
@click.option("--num-prompts", type=click.IntRange(1), default=64, show_default=True, help="Requests in all.")
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True, help="Tokens of an answer.")
@click.option("--num-warmups", type=click.IntRange(0), default=1, show_default=True, help="Requests before the clock.")
@click.option("--seed", type=int, default=0, show_default=True, help="Prompts are the same for the same seed.")
@click.option(
    "--token-ids",
    type=click.IntRange(0),
    nargs=2,
    default=(1000, 30000),
    show_default=True,
    help="Range the prompts' ids are drawn from.",
)
@click.option("--poll-health", "polls_health", is_flag=True, help="Measure GET /health, too, 20 times a second.")
@click.option(
    "--save-result", type=click.Path(dir_okay=False, path_type=Path), help="File to write all numbers to, as JSON."
)
def command(
    *,
    url: str,
    api_key: str | None,
    model: str | None,
    num_clients: int,
    num_warmups: int,
    token_ids: tuple[int, int],
    polls_health: bool,
    save_result: Path | None,
    **workload: int,
) -> None:
    """Load a running OpenAI-compatible server with N clients, each sending its next request when its last is answered.

    Prompts are random token ids and answers have a fixed length. Exits with 1 if any request failed.
    """
    low_id, high_id = sorted(token_ids)
    load = Workload(low_id=low_id, high_id=high_id, **workload)
    result = asyncio.run(
        run(
            url,
            api_key,
            model,
            load,
            num_clients=num_clients,
            num_warmups=num_warmups,
            polls_health=polls_health,
        )
    )
    if save_result is not None:
        save_result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if result["failed"]:
        raise SystemExit(1)
