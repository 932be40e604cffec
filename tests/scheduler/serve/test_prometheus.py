import asyncio
import math
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.events import Finished, Timings, Usage
from scheduler.metrics import Metrics
from scheduler.request import FinishReason
from scheduler.serve.prometheus import Exposition

# https://docs.vllm.ai/en/stable/design/metrics.html
VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
}


class FakeEngine:
    def __init__(self):
        self.metrics = Metrics()
        self.num_running = 0
        self.num_waiting = 0
        self.cache_usage = 0.0


@pytest.fixture
def engine():
    return FakeEngine()


def _samples(exposition):
    return [
        sample
        for family in text_string_to_metric_families(exposition.render().decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def _value(exposition, name, **labels):
    (found,) = [
        sample.value
        for sample in _samples(exposition)
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


def test_every_name_is_vllms_and_every_sample_carries_the_models_name_and_no_requests(engine):
    samples = _samples(Exposition(engine, "smol"))
    assert {sample.name for sample in samples} >= VLLM_NAMES
    for sample in samples:
        assert sample.labels.pop("model_name") == "smol"
        assert set(sample.labels) <= {"le", "finished_reason", "kind"}


def test_gauges_and_counters_are_read_at_each_scrape(engine):
    exposition = Exposition(engine, "smol")
    assert _value(exposition, "vllm:num_requests_running") == 0
    engine.num_running, engine.num_waiting, engine.cache_usage = 3, 2, 0.25
    engine.metrics.prompt_tokens = 11
    engine.metrics.on_token(None, 1.0)
    assert _value(exposition, "vllm:num_requests_running") == 3
    assert _value(exposition, "vllm:num_requests_waiting") == 2
    assert _value(exposition, "vllm:kv_cache_usage_perc") == 0.25
    assert _value(exposition, "vllm:prompt_tokens_total") == 11
    assert _value(exposition, "vllm:generation_tokens_total") == 1


def test_ended_requests_are_counted_under_the_reason_they_ended_for(engine):
    exposition = Exposition(engine, "smol")
    timings = Timings(queue_s=0.5, prefill_s=1.0, decode_s=2.0, e2e_s=3.5, ttft_s=1.5)
    engine.metrics.on_finished(Finished("r", FinishReason.ABORT, Usage(5, 4), timings))
    by_reason = {
        reason: _value(exposition, "vllm:request_success_total", finished_reason=reason.value)
        for reason in FinishReason
    }
    assert by_reason == {reason: float(reason is FinishReason.ABORT) for reason in FinishReason}
    assert _value(exposition, "vllm:e2e_request_latency_seconds_sum") == 3.5
    assert _value(exposition, "vllm:request_queue_time_seconds_count") == 1


def test_buckets_are_cumulative_and_the_last_one_counts_all(engine):
    exposition = Exposition(engine, "smol")
    for previous, now in ((0.0, 0.0005), (0.0, 0.02), (0.0, 1e6)):
        engine.metrics.on_token(previous, now)
    buckets = [s for s in _samples(exposition) if s.name == "vllm:inter_token_latency_seconds_bucket"]
    counts = [bucket.value for bucket in buckets]
    assert counts == sorted(counts)
    assert buckets[-1].labels["le"] == "+Inf"
    assert counts[-1] == _value(exposition, "vllm:inter_token_latency_seconds_count") == 3
    assert next(b.value for b in buckets if b.labels["le"] == "0.025") == 2


def test_every_value_is_finite(engine):
    assert all(math.isfinite(sample.value) for sample in _samples(Exposition(engine, "smol")))


def test_two_servers_in_one_process_do_not_share_their_metrics(engine):
    one, other = Exposition(engine, "one"), Exposition(FakeEngine(), "other")
    engine.num_running = 5
    assert _value(one, "vllm:num_requests_running") == 5
    assert _value(other, "vllm:num_requests_running") == 0


async def test_a_blocked_event_loop_shows_as_lag(engine):
    exposition = Exposition(engine, "smol")
    task = asyncio.create_task(exposition.measure_lag())
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - blocking the loop is the point
    while _value(exposition, "lockstep:event_loop_lag_seconds_count") == 0:  # noqa: ASYNC110 - a histogram wakes nobody
        await asyncio.sleep(0.01)
    task.cancel()
    assert _value(exposition, "lockstep:event_loop_lag_seconds_sum") >= 0.2
