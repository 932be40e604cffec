"""`lockstep generate`: one prompt, completed in this process by the engine alone."""

import sys
import time
from datetime import datetime

import click

from clients.pull import DEFAULT_MODEL, resolve


@click.command("generate")
@click.argument("prompt")
@click.option(
    "--model", default=DEFAULT_MODEL, envvar="LOCKSTEP_MODEL", show_default=True, help="A .gguf file or a known name."
)
@click.option("--raw", is_flag=True, help="Go on from PROMPT as it is, instead of answering it as a chat message.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Length of the answer at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token.")
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    help="Sample from the likeliest tokens that together have this probability.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same answer.")
@click.option(
    "--kernels",
    default="auto",
    show_default=True,
    help="Kernel set: auto, compiled, its slow definition reference-int8, or reference.",
)
@click.option(
    "--weights",
    default="auto",
    show_default=True,
    help="Float weights: f32 keeps them, auto lets the compiled kernels round them to 8 bits.",
)
@click.option(
    "--kv-dtype", default="float16", show_default=True, help="Type of the cached keys and values: float16 or float32."
)
def command(
    *,
    prompt: str,
    model: str,
    raw: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    kernels: str,
    weights: str,
    kv_dtype: str,
) -> None:
    """Answer PROMPT ("-" reads it from stdin) without a server: bit for bit the answer a server would give."""
    text = sys.stdin.read() if prompt == "-" else prompt
    path = resolve(model)

    from engine.generate import generate
    from engine.model import Model
    from engine.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    loaded = Model.load(path, kernels=kernels, weights=weights)
    if raw or loaded.chat_template is None:
        prompt_ids = loaded.tokenizer.encode(text)
    else:
        chat = loaded.chat_template.render([{"role": "user", "content": text}], now=datetime.now)
        prompt_ids = chat.encode(loaded.tokenizer)

    generation = generate(
        loaded,
        loaded.tokenizer,
        prompt_ids,
        params,
        kv_dtype=kv_dtype,
        on_text=lambda piece: click.echo(piece, nl=False),
        clock=time.perf_counter,
    )
    click.echo()
    timings, stats = generation.timings, generation.stats
    assert timings is not None
    if max_tokens == 0:
        click.echo(f"{stats.num_prompt_tokens} prompt tokens, not computed: no token was asked for", err=True)
        return
    click.echo(
        f"{stats.num_prompt_tokens} prompt tokens in {timings.prefill_s:.2f} s, "
        f"{stats.num_completion_tokens} tokens in {timings.decode_s:.2f} s more, ended by {generation.finish_reason}",
        err=True,
    )
