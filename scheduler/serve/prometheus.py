"""`/metrics`: the scheduler's counts under vLLM's names, rendered from plain numbers when asked.

Names, meanings and the label `model_name` are vLLM's (vllm/v1/metrics/loggers.py), so that its dashboards work; what
vLLM has no name for is under `lockstep:`. No label depends on a request.
"""

import asyncio
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LiveHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from scheduler.metrics import Histogram, Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAG_INTERVAL_S = 0.25
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Observed(Protocol):
    """What is read at every scrape."""

    @property
    def metrics(self) -> Metrics:
        """Totals since the start."""

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""

    @property
    def cache_usage(self) -> float:
        """The part of the KV cache that is filled, 0 to 1."""


class Exposition:
    """One registry of its own, filled from an engine's counts: several servers may live in one process."""

    def __init__(self, engine: Observed, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))
        self._lag = LiveHistogram(
            "lockstep:event_loop_lag_seconds",
            "How late the event loop woke a sleeping task.",
            labelnames=["model_name"],
            buckets=LAG_BUCKETS_S,
            registry=self._registry,
        ).labels(model_name)

    def render(self) -> bytes:
        """The Prometheus text format, version 0.0.4; serve it as `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    async def measure_lag(self) -> None:
        """Observe how late this event loop is, until cancelled."""
        while True:
            due = time.monotonic() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lag.observe(max(0.0, time.monotonic() - due))


class _EngineCollector(Collector):
    def __init__(self, engine: Observed, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Every metric of the engine, as of now."""
        engine, metrics = self._engine, self._engine.metrics
        yield self._gauge("vllm:num_requests_running", "Sequences that hold a slot.", engine.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for a slot.", engine.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV cache usage, 1 = full.", engine.cache_usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens prefilled.", metrics.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens sampled.", metrics.generation_tokens)

        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in metrics.num_finished.items():
            finished.add_metric([self._model_name, reason.value], count)
        yield finished

        for name, about, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", metrics.ttft_s),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", metrics.itl_s),
            ("vllm:time_per_output_token_seconds", "The same under its older name.", metrics.itl_s),
            ("vllm:request_time_per_output_token_seconds", "Mean gap within a sequence.", metrics.tpot_s),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", metrics.e2e_s),
            ("vllm:request_queue_time_seconds", "From arrival to the slot.", metrics.queue_s),
            ("vllm:request_prefill_time_seconds", "From the slot to the first token.", metrics.prefill_s),
            ("vllm:request_decode_time_seconds", "From the first token to the end.", metrics.decode_s),
            ("vllm:request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens sampled for a request.", metrics.request_generation_tokens),
            ("vllm:iteration_tokens_total", "Tokens of one tick.", metrics.tick_tokens),
        ):
            yield self._histogram(name, about, histogram)

        ticks = CounterMetricFamily("lockstep:ticks", "Forwards run, by kind.", labels=["model_name", "kind"])
        ticks.add_metric([self._model_name, "prefill"], metrics.prefill_ticks)
        ticks.add_metric([self._model_name, "decode"], metrics.decode_ticks)
        yield ticks

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _histogram(self, name: str, about: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, about, labels=["model_name"])
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric([self._model_name], buckets, histogram.sum)
        return family
