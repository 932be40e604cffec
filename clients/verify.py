"""`lockstep verify`: the promise of equal answers, tried on this machine with this model."""

import importlib.metadata
import json
import platform
import shlex
import time
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from clients.progress import progress
from clients.pull import DEFAULT_MODEL, resolve
from engine.kernels.compiled.workers import physical_cores
from engine.model import Model
from engine.verify import Difference, Report, verify, verify_mix

LIBRARIES = ("numpy", "llvmlite")
EXACT = "EXACT: every row compared has, bit for bit, the logits it has alone."
NOT_ALL_TRIED = "A longer run tries the rest."
NOT_EXACT = "NOT EXACT: this machine does not keep the promise. Please report it with this page."


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was verified and what came of it. `fingerprints` are those of answers, by the cache's dtype."""

    path: str
    model: str
    kernels: str
    weights: str
    cpu_path: str
    fingerprints: Mapping[str, str]
    versions: Mapping[str, str]
    duration_s: float
    report: Report

    def to_json(self) -> dict[str, Any]:
        """Everything, and the verdict as `is_exact`."""
        return {**msgspec.to_builtins(self), "is_exact": self.report.is_exact}

    def to_text(self) -> str:
        """The page for people."""
        report = self.report
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        fingerprints = ", ".join(f"{name} with a {dtype} cache" for dtype, name in self.fingerprints.items())
        compared = f"{report.total.num_rows} rows of {report.num_sequences} sequences"
        mixes = f"{report.num_mixes} random mixes of seed {report.seed}"
        lines = [
            _line("model", f"{self.model} ({self.path})"),
            _line("kernels", f"{self.kernels} ({self.cpu_path}), weights {self.weights}"),
            _line("versions", versions),
            _line("fingerprints", fingerprints),
            _line("compared", f"{compared} in {mixes} with their solo runs, in {self.duration_s:.0f} s"),
            "",
            f"{'':28}{'rows':>10}{'differing':>12}",
        ]
        for group, counts in report.kinds.items():
            lines.append(group)
            for kind, count in counts.items():
                differing = count.num_differing if count.num_rows else "not tried"
                lines.append(f"  {kind:26}{count.num_rows:>10}{differing:>12}")
        lines.append(f"{'all':28}{report.total.num_rows:>10}{report.total.num_differing:>12}")
        if report.first_difference is not None:
            lines += ["", *self._described(report.first_difference)]
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        if not self.report.is_exact:
            return NOT_EXACT
        counts = (count for group in self.report.kinds.values() for count in group.values())
        return EXACT if all(count.num_rows for count in counts) else f"{EXACT} {NOT_ALL_TRIED}"

    def _described(self, first: Difference) -> list[str]:
        where = f"tick {first.tick}, slot {first.slot}, position {first.position} (token {first.token_id})"
        kinds = ", ".join(f"{group}: {kind}" for group, kind in first.kinds.items())
        largest = "one is not a number" if first.largest is None else f"by {first.largest:.3g} at most"
        values = f"of token {first.first}: {first.alone} alone, {first.mixed} in the mix"
        again = f"lockstep verify {shlex.quote(self.path)} --kernels {self.kernels} --weights {self.weights}"
        return [
            f"first difference: mix {first.mix} of seed {first.seed}, {where}",
            f"  kinds       {kinds}",
            f"  tick        {first.num_rows} rows of {first.num_sequences} sequences",
            f"  logits      {first.num_differing} differ, {largest}; {values}",
            f"  run again   {again} --seed {first.seed} --mix {first.mix}",
        ]


def _line(title: str, value: str) -> str:
    return f"{title:<13} {value}"


def outcome(model: Model, weights: str, report: Report, duration_s: float) -> Outcome:
    """`report` together with all that decides a model's bits."""
    return Outcome(
        path=str(model.path),
        model=model.config.name,
        kernels=model.kernels,
        weights=weights,
        cpu_path=model.cpu_path,
        fingerprints={dtype: model.fingerprint(dtype) for dtype in report.kinds["cache"]},
        versions={
            "lockstep": importlib.metadata.version("lockstep-llm"),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in LIBRARIES},
        },
        duration_s=duration_s,
        report=report,
    )


def run(models: Mapping[int, Model], *, weights: str, seed: int, seconds: float, mix: int | None) -> Outcome:
    """What came of random mixes during `seconds`, or of one `mix`; `models` as `engine.verify` takes them."""
    t_start = time.monotonic()
    if mix is not None:
        report = verify_mix(models, seed=seed, number=mix)
    else:
        with progress(f"Comparing random mixes with solo runs for {seconds:g} s", 100) as advance:
            shown = 0

            def show(_: Report) -> None:
                nonlocal shown
                percent = min(round(100 * (time.monotonic() - t_start) / seconds), 100) if seconds else 100
                advance(percent - shown)
                shown = percent

            report = verify(models, seed=seed, seconds=seconds, clock=time.monotonic, progress=show)
    return outcome(models[1], weights, report, time.monotonic() - t_start)


def by_threads(model: Model) -> dict[int, Model]:
    """The model run by one thread, and by several where the kernels can."""
    if model.kernels != "compiled":
        return {1: model}
    return {threads: model.with_threads(threads) for threads in (1, max(physical_cores(), 2))}


@click.command("verify")
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
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The mixes are drawn from it.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=60.0, show_default=True, help="How long to begin new comparisons."
)
@click.option("--mix", type=click.IntRange(0), help="Run this mix alone, whole: to see a difference again.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    *, model: str, kernels: str, weights: str, seed: int, seconds: float, mix: int | None, as_json: bool
) -> None:
    """Verify on this machine that MODEL answers every request as if it were alone.

    Random mixes of sequences, in all the ways a busy server may run them, are compared bit for bit with each sequence
    run alone. Exits with 1 if any logit differs.
    """
    path = resolve(model)
    click.echo(f"Loading {path.name}", err=True)
    models = by_threads(Model.load(path, kernels=kernels, weights=weights))
    verified = run(models, weights=weights, seed=seed, seconds=seconds, mix=mix)
    click.echo(json.dumps(verified.to_json(), indent=1) if as_json else verified.to_text())
    if not verified.report.is_exact:
        raise SystemExit(1)
