"""From what was measured of each request to latencies and throughput, in the names and layout of `vllm bench serve`."""

import itertools
import math
from collections.abc import Sequence

import msgspec

WIDTH = 50
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "health": "Answer to GET /health",
}
STATISTICS = {"mean": "Mean", "median": "Median", "p99": "P99"}


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. `t_pieces` are the instants, in seconds, at which a piece of text arrived.

    `error` is None for a request that was answered to its end, with at least one piece.
    """

    t_start: float
    t_pieces: tuple[float, ...] = ()
    num_prompt: int = 0
    num_output: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.t_pieces[0] - self.t_start

    @property
    def itls_s(self) -> list[float]:
        """The gaps between one piece of text and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.t_pieces)]

    @property
    def e2el_s(self) -> float:
        """Time to the last token."""
        return self.t_pieces[-1] - self.t_start

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None if there was only one."""
        return (self.e2el_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark's numbers, durations in seconds and latencies in milliseconds.

    `latencies` goes from the keys of `LATENCIES` to those of `STATISTICS`; what was never measured is not in it.
    """

    duration: float
    max_concurrency: int
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    latencies: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, float]:
        """One flat object, its keys those of `vllm bench serve --save-result`."""
        flat = {name: value for name, value in msgspec.to_builtins(self).items() if name != "latencies"}
        for name, statistics in self.latencies.items():
            flat |= {f"{statistic}_{name}_ms": value for statistic, value in statistics.items()}
        return flat

    def to_text(self) -> str:
        """The table that `vllm bench serve` prints."""
        lines = [
            f"{' Serving Benchmark Result ':=^{WIDTH}}",
            _line("Successful requests:", self.completed),
            _line("Failed requests:", self.failed),
            _line("Maximum request concurrency:", self.max_concurrency),
            _line("Benchmark duration (s):", self.duration),
            _line("Total input tokens:", self.total_input_tokens),
            _line("Total generated tokens:", self.total_output_tokens),
            _line("Request throughput (req/s):", self.request_throughput),
            _line("Output token throughput (tok/s):", self.output_throughput),
            _line("Total token throughput (tok/s):", self.total_token_throughput),
        ]
        for name, statistics in self.latencies.items():
            lines.append(f"{LATENCIES[name]:-^{WIDTH}}")
            for statistic, value in statistics.items():
                lines.append(_line(f"{STATISTICS[statistic]} {name.upper()} (ms):", value))
        lines.append("=" * WIDTH)
        return "\n".join(lines)


def summarize(
    traces: Sequence[Trace], *, duration_s: float, max_concurrency: int, health_s: Sequence[float] = ()
) -> Summary:
    """The numbers of all `traces`; those that failed count as failed and as nothing else.

    `health_s` is how long the server took to say that it is well, each time it was asked meanwhile.
    """
    done = [trace for trace in traces if trace.error is None]
    num_input = sum(trace.num_prompt for trace in done)
    num_output = sum(trace.num_output for trace in done)
    samples = {
        "ttft": [trace.ttft_s for trace in done],
        "tpot": [trace.tpot_s for trace in done if trace.tpot_s is not None],
        "itl": [gap for trace in done for gap in trace.itls_s],
        "e2el": [trace.e2el_s for trace in done],
        "health": health_s,
    }
    return Summary(
        duration=duration_s,
        max_concurrency=max_concurrency,
        completed=len(done),
        failed=len(traces) - len(done),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=len(done) / duration_s,
        output_throughput=num_output / duration_s,
        total_token_throughput=(num_input + num_output) / duration_s,
        latencies={name: _statistics(seconds) for name, seconds in samples.items() if seconds},
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, interpolated linearly between the two nearest."""
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def _statistics(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "mean": 1000 * sum(seconds) / len(seconds),
        "median": 1000 * percentile(seconds, 50),
        "p99": 1000 * percentile(seconds, 99),
    }


def _line(title: str, value: float) -> str:
    return f"{title:<40} {value:<10.2f}" if isinstance(value, float) else f"{title:<40} {value:<10}"
