"""What is counted: plain numbers, fed by the core with timestamps from outside.

Names and meanings follow vLLM's metrics; rendering them for Prometheus is the service's business.
"""

from bisect import bisect_left
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from scheduler.events import Finished
from scheduler.policy import Decode, Prefill
from scheduler.request import FinishReason
from scheduler.sequence import Sequence

TOKEN_GAP_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_BUCKETS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_COUNT_BUCKETS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
    *(1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0),
)
TICK_TOKEN_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)


class Histogram:
    """Observations counted by upper bound, and their sum; the last of `counts` is for what is above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence_[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count `value` in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def _seconds() -> Histogram:
    return Histogram(REQUEST_BUCKETS_S)


def _tokens() -> Histogram:
    return Histogram(TOKEN_COUNT_BUCKETS)


@dataclass(slots=True)
class Metrics:
    """Totals since the start.

    `num_requests` counts what was submitted; `num_finished` by reason adds up to it once all have ended. Prompt tokens
    count when their prefill is complete, once whatever `n`; generation tokens as they are sampled, EOS included.
    Inter-token latency (`itl_s`) and time per output token (`tpot_s`: its mean within a choice) are per choice, the
    rest per request.
    """

    num_requests: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefill_ticks: int = 0
    decode_ticks: int = 0
    tick_tokens: Histogram = field(default_factory=lambda: Histogram(TICK_TOKEN_BUCKETS))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_BUCKETS_S))
    tpot_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_BUCKETS_S))
    e2e_s: Histogram = field(default_factory=_seconds)
    queue_s: Histogram = field(default_factory=_seconds)
    prefill_s: Histogram = field(default_factory=_seconds)
    decode_s: Histogram = field(default_factory=_seconds)
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_generation_tokens: Histogram = field(default_factory=_tokens)

    def on_tick(self, kind: Prefill | Decode, num_tokens: int) -> None:
        """One forward is about to run."""
        if isinstance(kind, Prefill):
            self.prefill_ticks += 1
        else:
            self.decode_ticks += 1
        self.tick_tokens.observe(num_tokens)

    def on_token(self, t_previous: float | None, now: float) -> None:
        """One token was sampled; `t_previous` is when the one before it in its choice was, None for the first."""
        self.generation_tokens += 1
        if t_previous is not None:
            self.itl_s.observe(now - t_previous)

    def on_choice_finished(self, sequence: Sequence) -> None:
        """One choice is over."""
        num_gaps = len(sequence.output_ids) - 1
        if num_gaps > 0:
            assert sequence.t_first_token is not None
            assert sequence.t_last_token is not None
            self.tpot_s.observe((sequence.t_last_token - sequence.t_first_token) / num_gaps)

    def on_finished(self, finished: Finished) -> None:
        """One request is over."""
        timings = finished.timings
        self.num_finished[finished.reason] += 1
        self.e2e_s.observe(timings.e2e_s)
        self.queue_s.observe(timings.queue_s)
        self.prefill_s.observe(timings.prefill_s)
        self.decode_s.observe(timings.decode_s)
        if timings.ttft_s is not None:
            self.ttft_s.observe(timings.ttft_s)
        self.request_prompt_tokens.observe(finished.usage.prompt_tokens)
        self.request_generation_tokens.observe(finished.usage.completion_tokens)
