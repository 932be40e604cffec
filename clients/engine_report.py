"""The numbers of `lockstep bench engine`, as a table and as JSON."""

import statistics
from typing import Any

import msgspec

from clients.engine_speed import Figure, Settings

HEADER = "        context  batch   tokens/s  ms/forward  G madds/s  of limit  weights GB/s  of limit"


class MachineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What `threads` threads reach at most, one rate per repeat."""

    cpu: str
    cpu_path: str
    threads: int
    multiply_adds_per_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. The process has `before` in memory without the model, `loaded` with it, and `filled` at the end.

    `cache` is what the cache reserves; it is in memory as far as figures have filled it.
    """

    before: int | None
    loaded: int | None
    filled: int | None
    weights_in_file: int
    cache: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Everything measured in one run."""

    date: str
    path: str
    model: str
    kernels: str
    cpu_path: str
    version: str
    settings: Settings
    limits: MachineLimits
    figures: tuple[Figure, ...]
    left_out: tuple[str, ...]
    weight_bytes: int
    memory: Memory

    def multiply_adds_share(self, figure: Figure) -> float:
        """Multiply-adds of the weight products per second of the whole step, over the raw rate."""
        return figure.multiply_adds_per_s / statistics.median(self.limits.multiply_adds_per_s)

    def weight_bytes_per_s(self, figure: Figure) -> float:
        """Bytes of weights in the file that each forward reads, per second."""
        return self.weight_bytes * figure.num_forwards / figure.median_s

    def read_share(self, figure: Figure) -> float:
        """Bytes of weights per second over the bandwidth of a plain read."""
        return self.weight_bytes_per_s(figure) / statistics.median(self.limits.bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        """Everything, each figure with the numbers derived from it."""
        return {
            **msgspec.to_builtins(self),
            "figures": [
                {
                    **msgspec.to_builtins(figure),
                    "tokens_per_s": figure.tokens_per_s,
                    "multiply_adds_per_s": figure.multiply_adds_per_s,
                    "multiply_adds_share": self.multiply_adds_share(figure),
                    "weight_bytes_per_s": self.weight_bytes_per_s(figure),
                    "read_share": self.read_share(figure),
                }
                for figure in self.figures
            ],
        }

    def to_text(self) -> str:
        """The table for people."""
        lines = [
            f"model    {self.model} ({self.path})",
            f"kernels  {self.kernels} ({self.cpu_path}), {self.settings.kv_dtype} cache, lockstep {self.version}",
            self._limits_line(),
            "",
            HEADER,
        ]
        lines += [self._row(figure) for figure in self.figures]
        return "\n".join([*lines, *self.left_out, "", self._memory_line()])

    def _limits_line(self) -> str:
        limits = self.limits
        dots, read = statistics.median(limits.multiply_adds_per_s), statistics.median(limits.bytes_per_s)
        return (
            f"limits   {dots / 1e9:.1f} G multiply-adds/s from registers ({limits.cpu_path}) and {read / 1e9:.1f} GB/s "
            f"read from memory, with {limits.threads} threads of {limits.cpu}"
        )

    def _row(self, figure: Figure) -> str:
        row = (
            f"{figure.phase:7}{figure.context:>8}{figure.batch:>7}{figure.tokens_per_s:>11.1f}"
            f"{1000 * figure.median_s / figure.num_forwards:>12.2f}"
            f"{figure.multiply_adds_per_s / 1e9:>11.1f}{self.multiply_adds_share(figure):>10.1%}"
        )
        if figure.phase == "decode":
            row += f"{self.weight_bytes_per_s(figure) / 1e9:>14.1f}{self.read_share(figure):>10.1%}"
        return row

    def _memory_line(self) -> str:
        memory = self.memory
        return (
            f"memory   {_megabytes(memory.before)} before the model is loaded, {_megabytes(memory.loaded)} with it "
            f"(weights in the file: {_megabytes(memory.weights_in_file)}), {_megabytes(memory.filled)} at the end with "
            f"a cache for {_megabytes(memory.cache)}"
        )


def _megabytes(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else f"{n_bytes / 1e6:.0f} MB"
