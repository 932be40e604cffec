import asyncio
import math
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.batch import RowError
from engine.params import SamplingParams
from scheduler.events import Finished, Timings, Usage
from scheduler.metrics import Metrics
from scheduler.output import TokensOnly
from scheduler.request import FinishReason, Request
from scheduler.sequence import Sequence
from scheduler.serve.prometheus import Exposition
from tests.fakes import FakeBackend
from tests.scheduler.serve.rig import reset, until

REQUEST = Request(id="r", prompt_ids=(1,), params=SamplingParams())
SEQUENCE = Sequence(REQUEST, 0, limit=1, t_arrival=0.0, open_output=TokensOnly)

# vllm/v1/metrics/loggers.py; https://docs.vllm.ai/en/stable/design/metrics.html
VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prompt_tokens_total": "counter",
    "prompt_tokens_by_source_total": "counter",
    "prompt_tokens_cached_total": "counter",
    "generation_tokens_total": "counter",
    "request_success_total": "counter",
    "admission_rejections_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
    "iteration_tokens_total": "histogram",
}
VLLM_REQUEST_BOUNDS = (
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
)
VLLM_TOKEN_GAP_BOUNDS = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
VLLM_BOUNDS = {
    "time_to_first_token_seconds": (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
    ),
    "inter_token_latency_seconds": VLLM_TOKEN_GAP_BOUNDS,
    "request_time_per_output_token_seconds": VLLM_TOKEN_GAP_BOUNDS,
    "e2e_request_latency_seconds": VLLM_REQUEST_BOUNDS,
    "request_queue_time_seconds": VLLM_REQUEST_BOUNDS,
    "request_inference_time_seconds": VLLM_REQUEST_BOUNDS,
    "request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "request_prompt_tokens": "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0",
    "iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0",
}
# llama.cpp, tools/server/README.md. It calls n_tokens_max a counter; a highest value so far is a gauge.
LLAMACPP = {
    "prompt_tokens_total": "counter",
    "prompt_seconds_total": "counter",
    "prompt_tokens_seconds": "gauge",
    "tokens_predicted_total": "counter",
    "tokens_predicted_seconds_total": "counter",
    "predicted_tokens_seconds": "gauge",
    "requests_processing": "gauge",
    "requests_deferred": "gauge",
    "n_tokens_max": "gauge",
    "n_decode_total": "counter",
    "n_busy_slots_per_decode": "gauge",
}


class FakeEngine:
    def __init__(self):
        self.metrics = Metrics(max_len=256)
        self.n_slots = 4
        self.max_len = 256
        self.num_running = 0
        self.num_waiting = 0
        self.cache_usage = 0.0


@pytest.fixture
def engine():
    return FakeEngine()


def _types(exposition):
    lines = exposition.render().decode().splitlines()
    return dict(line.split(" ")[2:] for line in lines if line.startswith("# TYPE "))


def _samples(exposition):
    return [
        sample for family in text_string_to_metric_families(exposition.render().decode()) for sample in family.samples
    ]


def _value(exposition, name, **labels):
    (found,) = [
        sample.value
        for sample in _samples(exposition)
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


def test_names_and_types_are_those_of_vllm_and_llama_server_and_no_label_depends_on_a_request(engine):
    exposition = Exposition(engine, "smol")
    types = _types(exposition)
    of = {
        prefix: {name.removeprefix(prefix): kind for name, kind in types.items() if name.startswith(prefix)}
        for prefix in ("vllm:", "llamacpp:", "lockstep:", "process_")
    }
    assert (of["vllm:"], of["llamacpp:"]) == (VLLM, LLAMACPP)
    assert sum(map(len, of.values())) == len(types)
    for sample in _samples(exposition):
        if sample.name.startswith(("vllm:", "lockstep:")):
            assert sample.labels.pop("model_name") == "smol"
        cache = {"block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching"}
        assert set(sample.labels) <= {"le", "finished_reason", "kind", "reason", "source"} | cache


@pytest.mark.parametrize("name", VLLM_BOUNDS)
def test_buckets_are_vllms(engine, name):
    samples = [s for s in _samples(Exposition(engine, "smol")) if s.name == f"vllm:{name}_bucket"]
    assert [sample.labels["le"] for sample in samples] == [*VLLM_BOUNDS[name].split(), "+Inf"]


def test_gauges_and_counters_are_read_at_each_scrape(engine):
    exposition = Exposition(engine, "smol")
    assert _value(exposition, "vllm:num_requests_running") == 0
    engine.num_running, engine.num_waiting, engine.cache_usage = 3, 2, 0.25
    engine.metrics.prompt_tokens = 11
    engine.metrics.on_token(None)
    assert _value(exposition, "vllm:num_requests_running") == 3
    assert _value(exposition, "vllm:num_requests_waiting") == 2
    assert _value(exposition, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert _value(exposition, "vllm:kv_cache_usage_perc") == 0.25
    assert _value(exposition, "vllm:prompt_tokens_total") == 11
    assert _value(exposition, "vllm:generation_tokens_total") == 1


def test_ended_requests_are_counted_under_the_reason_they_ended_for(engine):
    exposition = Exposition(engine, "smol")
    timings = Timings(queue_s=0.5, prefill_s=1.0, decode_s=2.0, e2e_s=3.5, ttft_s=1.5)
    aborted = FinishReason.ABORT
    engine.metrics.on_finished(Finished("r", aborted, (aborted,), Usage(5, 4), timings), [SEQUENCE])
    by_reason = {
        reason: _value(exposition, "vllm:request_success_total", finished_reason=reason.value)
        for reason in FinishReason
    }
    assert by_reason == {reason: float(reason is FinishReason.ABORT) for reason in FinishReason}
    assert _value(exposition, "vllm:e2e_request_latency_seconds_sum") == 3.5
    assert _value(exposition, "vllm:request_queue_time_seconds_count") == 1


def test_buckets_are_cumulative_and_the_last_one_counts_all(engine):
    exposition = Exposition(engine, "smol")
    for gap_s in (0.0005, 0.02, 1e6):
        engine.metrics.on_token(gap_s)
    buckets = [s for s in _samples(exposition) if s.name == "vllm:inter_token_latency_seconds_bucket"]
    counts = [bucket.value for bucket in buckets]
    assert counts == sorted(counts)
    assert buckets[-1].labels["le"] == "+Inf"
    assert counts[-1] == _value(exposition, "vllm:inter_token_latency_seconds_count") == 3
    assert next(b.value for b in buckets if b.labels["le"] == "0.025") == 2


def test_every_value_is_finite_before_anything_has_run(engine):
    assert all(math.isfinite(sample.value) for sample in _samples(Exposition(engine, "smol")))


def test_the_size_of_the_cache_is_told_in_labels(engine):
    (sample,) = [s for s in _samples(Exposition(engine, "smol")) if s.name == "vllm:cache_config_info"]
    assert sample.value == 1
    assert (sample.labels["num_gpu_blocks"], sample.labels["block_size"]) == ("4", "256")
    assert sample.labels["kv_cache_size_tokens"] == "1024"


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb 1", "a}b", "模型", "a,b=c"])
def test_a_models_name_is_escaped(engine, name):
    (sample,) = [s for s in _samples(Exposition(engine, name)) if s.name == "lockstep:slots"]
    assert sample.labels["model_name"] == name


def test_a_models_name_that_is_no_utf8_can_be_shown(engine):
    (sample,) = [s for s in _samples(Exposition(engine, "a\udcffb")) if s.name == "lockstep:slots"]
    assert sample.labels["model_name"] == r"a\udcffb"


def test_llama_servers_averages_follow_from_its_totals(engine):
    exposition, metrics = Exposition(engine, "smol"), engine.metrics
    metrics.on_scheduled("prefill", num_tokens=30, num_busy=1)
    metrics.on_forward(0.5)
    metrics.prompt_tokens = 30
    metrics.on_token(None)
    metrics.on_scheduled("decode", num_tokens=2, num_busy=2)
    metrics.on_forward(0.25)
    metrics.on_token(0.25)
    assert _value(exposition, "llamacpp:prompt_seconds_total") == 0.5
    assert _value(exposition, "llamacpp:prompt_tokens_seconds") == 60
    assert _value(exposition, "llamacpp:tokens_predicted_total") == 2
    assert _value(exposition, "llamacpp:tokens_predicted_seconds_total") == 0.25
    assert _value(exposition, "llamacpp:predicted_tokens_seconds") == 4
    assert _value(exposition, "llamacpp:n_decode_total") == 2
    assert _value(exposition, "llamacpp:n_busy_slots_per_decode") == 1.5
    assert _value(exposition, "lockstep:ticks_total", kind="decode") == 1
    assert _value(exposition, "lockstep:tick_seconds_sum", kind="prefill") == 0.5
    assert _value(exposition, "lockstep:tick_tokens_sum", kind="prefill") == 30


async def test_counters_agree_with_the_usage_of_the_answers_whatever_ended_them(serve):
    def fault(work):
        sequence = work.sequence
        is_doomed = sequence.request.params.seed == 666 and len(sequence.output_ids) == 3
        return RowError("no") if is_doomed else None

    finished = []
    backend = FakeBackend(fault=fault, delay_s=0.001)
    server = await serve(backend, n_slots=2, max_len=200_000, on_finished=finished.append)
    whole, several, streamed, failed = await asyncio.gather(
        server.complete(max_tokens=5),
        server.chat(max_tokens=4, n=3),
        server.stream_chat(max_tokens=6, stream_options={"include_usage": True}),
        server.complete("a longer prompt that fails", max_tokens=50, seed=666),
    )
    assert failed.status == 500
    left, gone_in_the_queue = [
        await server.open("/v1/completions", {"prompt": "x" * 100, "max_tokens": 100_000, "stream": True, "n": 2})
        for _ in range(2)
    ]
    await left[0].readuntil(b"data:")
    await until(lambda: server.engine.num_waiting == 2)
    for _, writer in (left, gone_in_the_queue):
        reset(writer)
    await server.idle()
    await until(lambda: len(finished) == 6)

    exposition = server.service.exposition
    answers = [whole.json["usage"], several.json["usage"], streamed.usage]
    unanswered = [event.usage for event in finished if event.reason in {"abort", "error"}]
    assert len(unanswered) == 3
    for sample, field in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        used = sum(usage[field] for usage in answers) + sum(getattr(usage, field) for usage in unanswered)
        assert _value(exposition, f"vllm:{sample}_tokens_total") == used
        assert _value(exposition, f"vllm:request_{sample}_tokens_sum") == used
    prompt_tokens = _value(exposition, "vllm:prompt_tokens_total")
    assert _value(exposition, "vllm:prompt_tokens_by_source_total", source="local_compute") == prompt_tokens
    assert _value(exposition, "vllm:request_prefill_kv_computed_tokens_sum") == prompt_tokens
    assert _value(exposition, "llamacpp:tokens_predicted_total") == _value(exposition, "vllm:generation_tokens_total")
    reasons = {"length": 3, "abort": 2, "error": 1, "stop": 0}
    for reason, count in reasons.items():
        assert _value(exposition, "vllm:request_success_total", finished_reason=reason) == count
    assert all(math.isfinite(sample.value) for sample in _samples(exposition))


async def test_refusals_of_a_full_queue_are_counted_by_the_limit_they_would_pass(serve):
    server = await serve(FakeBackend(delay_s=0.01), n_slots=1, max_queue=1)
    exposition = server.service.exposition
    for limit in ("reqs", "tokens"):
        assert _value(exposition, "vllm:admission_rejections_total", reason=f"max_num_queued_{limit}") == 0
    running, waiting = (asyncio.create_task(server.complete(request_id=name, ignore_eos=True)) for name in "ab")
    await until(lambda: server.engine.num_waiting == 1)
    for _ in range(2):
        (await server.complete()).refused(429)
    for name in "ab":
        await server.request("DELETE", f"/v1/requests/{name}")
    await asyncio.gather(running, waiting)
    assert _value(exposition, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2
    assert _value(exposition, "vllm:admission_rejections_total", reason="max_num_queued_tokens") == 0


async def test_metrics_are_answered_while_a_forward_runs(serve):
    computing, go_on = threading.Event(), threading.Event()

    def fault(_work):
        computing.set()
        assert go_on.wait(60)

    server = await serve(FakeBackend(fault=fault))
    answer = asyncio.create_task(server.complete(max_tokens=1))
    await until(computing.is_set)
    reply = await server.get("/metrics")
    assert not answer.done()
    assert b'vllm:num_requests_running{model_name="fake"} 1.0' in reply.body
    go_on.set()
    assert (await answer).status == 200


def test_two_servers_in_one_process_do_not_share_their_metrics(engine):
    one, other = Exposition(engine, "one"), Exposition(FakeEngine(), "other")
    engine.num_running = 5
    assert _value(one, "vllm:num_requests_running") == 5
    assert _value(other, "vllm:num_requests_running") == 0


@pytest.mark.slow
async def test_a_blocked_event_loop_shows_as_lag(engine):
    exposition = Exposition(engine, "smol")
    task = asyncio.create_task(exposition.measure_lag())
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - blocking the loop is the point
    while _value(exposition, "lockstep:event_loop_lag_seconds_count") == 0:  # noqa: ASYNC110 - a histogram wakes nobody
        await asyncio.sleep(0.01)
    task.cancel()
    assert _value(exposition, "lockstep:event_loop_lag_seconds_sum") >= 0.2
