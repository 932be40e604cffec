"""What is counted: plain numbers, fed by the core with timestamps from outside.

Names and meanings follow vLLM's metrics; rendering them for Prometheus is the service's business.
"""

from bisect import bisect_left
from collections.abc import Iterable
from math import nan
from typing import Literal

from scheduler.events import Finished
from scheduler.request import FinishReason, Request
from scheduler.sequence import Sequence

TickKind = Literal["prefill", "decode"]
QueueLimit = Literal["requests", "tokens"]

# vLLM's bounds, so that one query covers both servers (vllm/v1/metrics/loggers.py).
TOKEN_GAP_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES_BUCKETS = (1, 2, 5, 10, 20)

# Ours are finer: a tick of a small model takes milliseconds.
TICK_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
TICK_BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0),
)


def token_count_buckets(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`: vLLM's bounds for counts of tokens in a context of that length."""
    bounds = (mantissa * 10**exponent for exponent in range(len(str(limit))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= limit)


class Histogram:
    """Observations counted by upper bound, and their sum; the last of `counts` is for what is above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """NaN if there were none."""
        return self.sum / self.count if self.count else nan

    def quantile(self, part: float) -> float:
        """About the value that this `part` of them do not pass, as if they were spread evenly within each bucket.

        NaN if there were none; the highest bound for what is above all bounds.
        """
        rank, below = part * self.count, 0
        lower = 0.0
        for upper, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (upper - lower) * (rank - below) / count
            lower, below = upper, below + count
        return self.bounds[-1] if self.count else nan

    def __repr__(self) -> str:
        if not self.count:
            return "Histogram(count=0)"
        quantiles = ", ".join(f"p{percent}~{self.quantile(percent / 100):.3g}" for percent in (50, 90, 99))
        return f"Histogram(count={self.count}, mean={self.mean:.3g}, {quantiles})"

    def observe(self, value: float) -> None:
        """Count `value` in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def _latencies() -> Histogram:
    return Histogram(REQUEST_BUCKETS_S)


class Ticks:
    """The forwards of one kind: rows of each, and seconds from handing it over until its results were back."""

    __slots__ = ("seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = Histogram(TICK_TOKEN_BUCKETS)
        self.seconds = Histogram(TICK_BUCKETS_S)

    def __repr__(self) -> str:
        return f"Ticks(tokens={self.tokens}, seconds={self.seconds})"


class Metrics:
    """Totals since the start, for slots of `max_len` positions.

    `num_requests` counts what was submitted; `num_finished` by reason adds up to it once all have ended, and then the
    tokens of all `Finished.usage` add up to `prompt_tokens` and `generation_tokens`, which grow as prompts are computed
    and tokens are sampled, EOS included. Inter-token latency (`itl_s`) and time per output token (`tpot_s`: its mean
    within a choice) are per choice, the rest per request. `decode_gap_s` is per tick: how long whoever had waited
    longest for a next token had waited.
    """

    def __init__(self, max_len: int) -> None:
        token_counts = token_count_buckets(max_len)
        self.num_requests = 0
        self.num_refused: dict[QueueLimit, int] = {"requests": 0, "tokens": 0}
        """Requests the queue had no room for, by what there were too many of."""
        self.num_finished = dict.fromkeys(FinishReason, 0)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.longest = 0
        """The most positions a choice that has ended had computed."""
        self.busy_slots = 0
        """Summed over ticks."""
        self.ticks: dict[TickKind, Ticks] = {"prefill": Ticks(), "decode": Ticks()}
        self.iteration_tokens = Histogram(ITERATION_TOKEN_BUCKETS)
        self.decode_gap_s = Histogram(TICK_BUCKETS_S)
        self.ttft_s = Histogram(FIRST_TOKEN_BUCKETS_S)
        self.itl_s = Histogram(TOKEN_GAP_BUCKETS_S)
        self.tpot_s = Histogram(TOKEN_GAP_BUCKETS_S)
        self.e2e_s = _latencies()
        self.queue_s = _latencies()
        self.prefill_s = _latencies()
        self.decode_s = _latencies()
        self.inference_s = _latencies()
        """Prefill and decode together."""
        self.request_prompt_tokens = Histogram(token_counts)
        self.request_generation_tokens = Histogram(token_counts)
        self.request_longest_choice_tokens = Histogram(token_counts)
        self.params_n = Histogram(CHOICES_BUCKETS)
        self.params_max_tokens = Histogram(token_counts)
        """Of requests that set it."""
        self._running_kind: TickKind = "prefill"
        self._longest_gap_s: float | None = None

    def on_submitted(self, request: Request) -> None:
        """One request was taken in."""
        self.num_requests += 1
        self.params_n.observe(request.n)
        if request.params.max_tokens is not None:
            self.params_max_tokens.observe(request.params.max_tokens)

    def on_refused(self, limit: QueueLimit) -> None:
        """One request was not taken in, since the queue would have passed `limit`."""
        self.num_refused[limit] += 1

    def on_scheduled(self, kind: TickKind, num_tokens: int, num_busy: int) -> None:
        """One forward of `num_tokens` rows is about to run while `num_busy` slots are taken."""
        self._running_kind = kind
        self.ticks[kind].tokens.observe(num_tokens)
        self.iteration_tokens.observe(num_tokens)
        self.busy_slots += num_busy

    def on_forward(self, seconds: float) -> None:
        """The forward scheduled last took `seconds`."""
        self.ticks[self._running_kind].seconds.observe(seconds)

    def on_first_token(self, ttft_s: float) -> None:
        """The first token of a request's choices was sampled."""
        self.ttft_s.observe(ttft_s)

    def on_token(self, gap_s: float | None) -> None:
        """One token was sampled, `gap_s` after the one before it in its choice, None for the first."""
        self.generation_tokens += 1
        if gap_s is not None:
            self.itl_s.observe(gap_s)
            if self._longest_gap_s is None or gap_s > self._longest_gap_s:
                self._longest_gap_s = gap_s

    def on_updated(self) -> None:
        """Every token of a tick has been counted."""
        if self._longest_gap_s is not None:
            self.decode_gap_s.observe(self._longest_gap_s)
            self._longest_gap_s = None

    def on_choice_finished(self, sequence: Sequence) -> None:
        """One choice is over."""
        self.longest = max(self.longest, sequence.num_computed)
        num_gaps = len(sequence.output_ids) - 1
        if num_gaps > 0:
            assert sequence.t_first_token is not None
            assert sequence.t_last_token is not None
            self.tpot_s.observe((sequence.t_last_token - sequence.t_first_token) / num_gaps)

    def on_finished(self, finished: Finished, choices: Iterable[Sequence]) -> None:
        """One request is over, all its `choices` are."""
        timings = finished.timings
        self.num_finished[finished.reason] += 1
        self.e2e_s.observe(timings.e2e_s)
        self.queue_s.observe(timings.queue_s)
        self.prefill_s.observe(timings.prefill_s)
        self.decode_s.observe(timings.decode_s)
        self.inference_s.observe(timings.prefill_s + timings.decode_s)
        self.request_prompt_tokens.observe(finished.usage.prompt_tokens)
        self.request_generation_tokens.observe(finished.usage.completion_tokens)
        self.request_longest_choice_tokens.observe(max(len(choice.output_ids) for choice in choices))
