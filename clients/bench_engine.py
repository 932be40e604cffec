"""`lockstep bench engine`: how fast the model alone is, held against what this machine can do at most."""

import contextlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from clients.engine_report import MachineLimits, Memory, Result
from clients.engine_speed import EngineSpeed, Figure, Settings, plan
from clients.errors import ClientError
from clients.limits_meter import LimitsMeter
from clients.machine import available_bytes, cpu_name, resident_bytes
from clients.progress import progress
from clients.pull import DEFAULT_MODEL, resolve
from engine.config import ModelConfig
from engine.cost import weight_bytes
from engine.gguf import GGUFFile
from engine.kernels.compiled.isa import detect
from engine.kernels.compiled.jit import Library
from engine.kernels.compiled.limits import Limits
from engine.kernels.compiled.workers import physical_cores
from engine.model import Model

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 1024, 4096)
MEMORY_SHARE = 0.8
"""As much of the available memory may be taken by the cache."""


def fitting(figures: Sequence[Figure], config: ModelConfig, settings: Settings) -> tuple[list[Figure], list[str]]:
    """The figures that can be measured here, and why the others cannot."""
    kept, left_out = [], {}
    position_bytes = 2 * config.n_layers * config.n_kv_heads * config.d_head * np.dtype(settings.kv_dtype).itemsize
    room = available_bytes()
    for figure in figures:
        end = figure.context + settings.num_steps
        cache_bytes = (figure.batch + 1) * end * position_bytes
        if end > config.max_context:
            left_out[f"context {figure.context}"] = f"with {settings.num_steps} steps it is over {config.max_context}"
        elif room is not None and cache_bytes > MEMORY_SHARE * room:
            what = f"batch {figure.batch} with context {figure.context}"
            left_out[what] = f"its cache takes {cache_bytes / 1e9:.1f} GB of {room / 1e9:.1f} GB available"
        else:
            kept.append(figure)
    return kept, [f"{what} is left out: {why}" for what, why in left_out.items()]


def run(path: Path, kernels: str, weights: str, threads: int, settings: Settings) -> Result:
    """Everything `settings` ask for, as far as it fits. Raises `ClientError` if nothing does."""
    before = resident_bytes()
    model = Model.load(path, kernels=kernels, threads=threads, weights=weights)
    loaded = resident_bytes()
    figures, left_out = fitting(plan(model.config, settings), model.config, settings)
    if not figures:
        raise ClientError("; ".join(left_out))
    speed = EngineSpeed(model, figures, settings, time.perf_counter)
    cpu_path = detect()
    rates: list[tuple[float, float]] = []
    seconds: list[list[float]] = []
    meter = LimitsMeter(Limits(Library(cpu_path)), threads=threads, clock=time.perf_counter)
    with (
        contextlib.closing(meter),
        progress(f"{len(figures)} figures, {settings.repeats} times", settings.repeats * len(figures)) as advance,
    ):
        for _ in range(settings.repeats):
            rates.append((meter.multiply_adds_per_s(), meter.bytes_per_s()))
            seconds.append([])
            for figure in figures:
                seconds[-1].append(speed.seconds(figure))
                advance(1)
    limits = MachineLimits(
        cpu=cpu_name(),
        cpu_path=cpu_path.name,
        threads=meter.threads,
        multiply_adds_per_s=tuple(dots for dots, _ in rates),
        bytes_per_s=tuple(read for _, read in rates),
    )
    with GGUFFile.open(path) as file:
        weights_in_file = sum(info.n_bytes for info in file.tensors.values())
        read_by_a_step = weight_bytes(file)
    return Result(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        path=str(path),
        model=model.config.name,
        kernels=model.kernels,
        cpu_path=model.cpu_path,
        version=importlib.metadata.version("lockstep-llm"),
        settings=settings,
        left_out=tuple(left_out),
        limits=limits,
        figures=tuple(
            msgspec.structs.replace(figure, seconds=repeats)
            for figure, repeats in zip(figures, zip(*seconds, strict=True), strict=True)
        ),
        weight_bytes=read_by_a_step,
        memory=Memory(
            before=before,
            loaded=loaded,
            filled=resident_bytes(),
            weights_in_file=weights_in_file,
            cache=speed.cache.nbytes_allocated(),
        ),
    )


def _counts(
    flag: str, name: str, default: tuple[int, ...], about: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option that may be given many times."""
    return click.option(
        flag, name, type=click.IntRange(1), multiple=True, default=default, show_default=True, help=about
    )


@click.command("engine")
@click.argument("model", default=DEFAULT_MODEL, envvar="LOCKSTEP_MODEL")
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
    "--threads",
    type=click.IntRange(1),
    help="Of the kernels and of the limits.  [default: physical cores]",
)
@_counts("--batch", "batches", BATCHES, "Sequences side by side; may be given many times.")
@_counts("--context", "contexts", CONTEXTS, "Positions of each sequence; may be given many times.")
@click.option("--chunk", type=click.IntRange(1), default=256, show_default=True, help="Rows in a forward of a prefill.")
@click.option(
    "--steps", "num_steps", type=click.IntRange(1), default=8, show_default=True, help="Forwards of a decode."
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="The median is shown.")
@click.option("--kv-dtype", type=click.Choice(["float16", "float32"]), default="float16", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Token ids are drawn from it.")
@click.option(
    "--save-result", type=click.Path(dir_okay=False, path_type=Path), help="File to write all numbers to, as JSON."
)
def command(
    *,
    model: str,
    kernels: str,
    weights: str,
    threads: int | None,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    save_result: Path | None,
    **settings: Any,
) -> None:
    """Measure prefill and decode of MODEL in this process, without a server or sampling.

    Beside each figure stands what this machine can do at most, measured in the same run. A prefill is of BATCH prompts
    side by side, a decode of BATCH sequences that each have CONTEXT positions behind them.
    """
    asked = Settings(batches=tuple(sorted({*batches})), contexts=tuple(sorted({*contexts})), **settings)
    result = run(resolve(model), kernels, weights, threads or physical_cores(), asked)
    click.echo(result.to_text())
    if save_result is not None:
        save_result.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
