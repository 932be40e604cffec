"""`/metrics`: the engine's counts, rendered from plain numbers when asked.

Names, meanings and bounds under `vllm:` are vLLM's (vllm/v1/metrics/loggers.py), those under `llamacpp:` are
llama-server's (tools/server/README.md), so that their dashboards work; what neither has a name for is under
`lockstep:`. No label depends on a request. `docs/metrics.md` has the table.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from scheduler.metrics import Histogram, Metrics, QueueLimit

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAG_INTERVAL_S = 0.25
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_QUEUE_LIMITS: dict[QueueLimit, str] = {"requests": "reqs", "tokens": "tokens"}
"""As vLLM spells them."""


class Observed(Protocol):
    """What is read at every scrape."""

    @property
    def metrics(self) -> Metrics:
        """Totals since the start."""

    @property
    def n_slots(self) -> int:
        """Slots there are."""

    @property
    def max_len(self) -> int:
        """Positions of a slot."""

    @property
    def num_running(self) -> int:
        """Choices that hold a slot."""

    @property
    def num_waiting(self) -> int:
        """Choices that wait for one."""

    @property
    def cache_usage(self) -> float:
        """The part of the KV cache that is filled, 0 to 1."""


class Exposition:
    """One registry of its own, filled from an engine's counts: several servers may live in one process.

    Nothing here waits for a forward: between two ticks' updates the counts stand still.
    """

    def __init__(self, engine: Observed, model_name: str) -> None:
        self._lag_s = Histogram(LAG_BUCKETS_S)
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, self._lag_s, model_name))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The Prometheus text format, version 0.0.4; serve it as `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    async def measure_lag(self) -> None:
        """Observe how late this event loop is, until cancelled."""
        while True:
            due = time.monotonic() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag_s.observe(max(0.0, time.monotonic() - due))


class _EngineCollector(Collector):
    def __init__(self, engine: Observed, lag_s: Histogram, model_name: str) -> None:
        self._engine = engine
        self._lag_s = lag_s
        # A file's name may hold bytes that are no UTF-8; the text format must be.
        self._model = {"model_name": model_name.encode(errors="backslashreplace").decode()}

    def collect(self) -> Iterator[Metric]:
        """Every metric of the engine, as of now."""
        yield from self._vllm()
        yield from self._llamacpp()
        yield from self._lockstep()

    def _vllm(self) -> Iterator[Metric]:
        engine, metrics, model = self._engine, self._engine.metrics, self._model
        yield _gauge("vllm:num_requests_running", "Choices that hold a slot.", engine.num_running, **model)
        yield _gauge("vllm:num_requests_waiting", "Choices that wait for a slot.", engine.num_waiting, **model)
        yield _gauge(
            "vllm:num_requests_waiting_by_reason",
            "The same by what they wait for, which is always capacity: a free slot.",
            engine.num_waiting,
            **model,
            reason="capacity",
        )
        yield _gauge("vllm:kv_cache_usage_perc", "Filled part of the KV cache, 1 = full.", engine.cache_usage, **model)
        yield _gauge(
            "vllm:cache_config_info",
            "Always 1; the labels say how large the KV cache is: a block is a slot.",
            1,
            **model,
            block_size=str(engine.max_len),
            num_gpu_blocks=str(engine.n_slots),
            kv_cache_size_tokens=str(engine.n_slots * engine.max_len),
            enable_prefix_caching="False",
        )
        yield _counter("vllm:prompt_tokens", "Prompt tokens computed.", metrics.prompt_tokens, **model)
        yield _counter_by(
            "source",
            "vllm:prompt_tokens_by_source",
            "The same by where they came from, which is always computing.",
            {"local_compute": metrics.prompt_tokens},
            **model,
        )
        yield _counter("vllm:prompt_tokens_cached", "Prompt tokens taken from a prefix cache: none yet.", 0, **model)
        yield _counter("vllm:generation_tokens", "Tokens sampled.", metrics.generation_tokens, **model)
        yield _counter_by(
            "finished_reason",
            "vllm:request_success",
            "Requests that ended, by why.",
            {reason.value: count for reason, count in metrics.num_finished.items()},
            **model,
        )
        yield _counter_by(
            "reason",
            "vllm:admission_rejections",
            "Requests refused since the queue was full, by what there were too many of.",
            {f"max_num_queued_{short}": metrics.num_refused[limit] for limit, short in _QUEUE_LIMITS.items()},
            **model,
        )
        for name, about, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", metrics.ttft_s),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a choice.", metrics.itl_s),
            ("vllm:time_per_output_token_seconds", "The same under its older name.", metrics.itl_s),
            ("vllm:request_time_per_output_token_seconds", "Mean time between a choice's tokens.", metrics.tpot_s),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", metrics.e2e_s),
            ("vllm:request_queue_time_seconds", "From arrival to a slot.", metrics.queue_s),
            ("vllm:request_prefill_time_seconds", "From the slot to the first token.", metrics.prefill_s),
            ("vllm:request_decode_time_seconds", "From the first token to the end.", metrics.decode_s),
            ("vllm:request_inference_time_seconds", "From the slot to the end.", metrics.inference_s),
            ("vllm:request_prompt_tokens", "Prompt tokens computed for a request.", metrics.request_prompt_tokens),
            ("vllm:request_prefill_kv_computed_tokens", "The same: all are computed.", metrics.request_prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens sampled for a request.", metrics.request_generation_tokens),
            (
                "vllm:request_max_num_generation_tokens",
                "Tokens of a request's longest choice.",
                metrics.request_longest_choice_tokens,
            ),
            ("vllm:request_params_n", "Choices a request asked for.", metrics.params_n),
            ("vllm:request_params_max_tokens", "Limit of the requests that set one.", metrics.params_max_tokens),
            ("vllm:iteration_tokens_total", "Rows of one tick.", metrics.iteration_tokens),
        ):
            yield _histogram(name, about, histogram, **model)

    def _llamacpp(self) -> Iterator[Metric]:
        """As llama-server has them: without labels, and averages over the whole life of the server."""
        engine, metrics = self._engine, self._engine.metrics
        prefill_s, gaps = metrics.ticks["prefill"].seconds.sum, metrics.itl_s
        num_ticks = sum(ticks.tokens.count for ticks in metrics.ticks.values())
        for name, about, value in (
            ("prompt_tokens", "Prompt tokens computed.", metrics.prompt_tokens),
            ("prompt_seconds", "Time prefill ticks took.", prefill_s),
            ("tokens_predicted", "Tokens sampled.", metrics.generation_tokens),
            ("tokens_predicted_seconds", "Time from token to token, summed over choices.", gaps.sum),
            ("n_decode", "Ticks, of both kinds.", num_ticks),
        ):
            yield _counter(f"llamacpp:{name}", about, value)
        for name, about, value in (
            ("prompt_tokens_seconds", "Prompt tokens per second of prefill.", _ratio(metrics.prompt_tokens, prefill_s)),
            ("predicted_tokens_seconds", "Tokens per second of one choice.", _ratio(gaps.count, gaps.sum)),
            ("requests_processing", "Choices that hold a slot.", engine.num_running),
            ("requests_deferred", "Choices that wait for a slot.", engine.num_waiting),
            ("n_tokens_max", "Most positions a choice has had when it ended.", metrics.longest),
            ("n_busy_slots_per_decode", "Slots taken in a tick, on average.", _ratio(metrics.busy_slots, num_ticks)),
        ):
            yield _gauge(f"llamacpp:{name}", about, value)

    def _lockstep(self) -> Iterator[Metric]:
        metrics, model = self._engine.metrics, self._model
        yield _gauge("lockstep:slots", "Slots there are.", self._engine.n_slots, **model)
        num_ticks: dict[str, float] = {}
        tokens: dict[str, Histogram] = {}
        seconds: dict[str, Histogram] = {}
        for kind, ticks in metrics.ticks.items():
            num_ticks[kind], tokens[kind], seconds[kind] = ticks.tokens.count, ticks.tokens, ticks.seconds
        yield _counter_by("kind", "lockstep:ticks", "Forwards run, by kind.", num_ticks, **model)
        yield _histogram_by("kind", "lockstep:tick_tokens", "Rows of one tick, by kind.", tokens, **model)
        yield _histogram_by("kind", "lockstep:tick_seconds", "Time one tick took, by kind.", seconds, **model)
        gap = "In each tick, how long the choice that had waited longest for its next token had waited."
        yield _histogram("lockstep:decode_gap_seconds", gap, metrics.decode_gap_s, **model)
        lag = "How late the event loop woke a sleeping task."
        yield _histogram("lockstep:event_loop_lag_seconds", lag, self._lag_s, **model)


def _ratio(amount: float, per: float) -> float:
    return amount / per if per else 0.0


def _gauge(name: str, about: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, about, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, about: str, value: float, **labels: str) -> Metric:
    """A counter; the format adds `_total` to its name."""
    family = CounterMetricFamily(name, about, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter_by(label: str, name: str, about: str, values: Mapping[str, float], **labels: str) -> Metric:
    """A counter whose `label` says which of `values` it is."""
    family = CounterMetricFamily(name, about, labels=[*labels, label])
    for key, value in values.items():
        family.add_metric([*labels.values(), key], value)
    return family


def _histogram(name: str, about: str, histogram: Histogram, **labels: str) -> Metric:
    family = HistogramMetricFamily(name, about, labels=list(labels))
    family.add_metric(list(labels.values()), _buckets(histogram), histogram.sum)
    return family


def _histogram_by(label: str, name: str, about: str, histograms: Mapping[str, Histogram], **labels: str) -> Metric:
    """A histogram whose `label` says which of `histograms` it is."""
    family = HistogramMetricFamily(name, about, labels=[*labels, label])
    for key, histogram in histograms.items():
        family.add_metric([*labels.values(), key], _buckets(histogram), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Each upper bound with the count of everything up to it."""
    return list(zip([*map(str, histogram.bounds), "+Inf"], accumulate(histogram.counts), strict=True))
