import asyncio
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.batch import RowError
from engine.params import SamplingParams
from scheduler.events import Finished, Timings, Usage
from scheduler.request import FinishReason, Request
from scheduler.serve.call import Call
from scheduler.serve.spans import Spans
from tests.fakes import FakeBackend
from tests.scheduler.serve.rig import reset, until

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
ATTRIBUTES = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "lockstep",
    "gen_ai.output.type": "text",
    "gen_ai.request.model": "fake",
    "gen_ai.request.stream": False,
    "gen_ai.request.choice.count": 2,
    "gen_ai.request.max_tokens": 4,
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.top_p": 0.75,
    "gen_ai.request.top_k": 7,
    "gen_ai.request.frequency_penalty": 0.25,
    "gen_ai.request.presence_penalty": 0.125,
    "gen_ai.request.seed": 11,
    "gen_ai.response.model": "fake",
    "gen_ai.response.finish_reasons": ("length", "length"),
    "gen_ai.usage.output_tokens": 8,
}


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def traced(serve, exporter):
    """Start servers whose spans come to `exporter`."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider)

    async def start(*args, **options):
        server = await serve(*args, on_finished=spans.end, **options)
        server.service.tracing = spans
        return server

    yield start
    provider.shutdown()


async def _spans(exporter, count):
    await until(lambda: len(exporter.get_finished_spans()) >= count)
    spans = exporter.get_finished_spans()
    assert len(spans) == count
    return spans


async def test_a_request_is_one_span_with_parameters_usage_and_reasons(traced, exporter):
    server = await traced()
    fields = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "frequency_penalty": 0.25, "presence_penalty": 0.125}
    reply = (await server.chat(max_tokens=4, n=2, seed=11, **fields)).json
    (span,) = await _spans(exporter, 1)
    assert (span.name, span.kind, span.parent) == ("chat fake", SpanKind.SERVER, None)
    told = {"gen_ai.response.id": reply["id"], "gen_ai.usage.input_tokens": reply["usage"]["prompt_tokens"]}
    assert dict(span.attributes) == ATTRIBUTES | told
    assert span.status.status_code is StatusCode.UNSET


def test_the_page_has_every_attribute_and_no_other():
    page = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text(encoding="utf-8")
    told = {"gen_ai.response.id", "gen_ai.usage.input_tokens", "error.type"}
    assert set(re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)) == ATTRIBUTES.keys() | told


async def test_what_was_asked_and_answered_is_not_recorded(traced, exporter):
    server = await traced()
    reply = await server.chat("a secret", max_tokens=20, stop=["another secret"])
    (span,) = await _spans(exporter, 1)
    recorded = span.to_json()
    assert "secret" not in recorded
    assert reply.json["choices"][0]["message"]["content"][:8] not in recorded


async def test_the_traceparent_of_a_request_is_its_spans_parent(traced, exporter):
    server = await traced()
    await server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1}, headers={"Traceparent": TRACEPARENT})
    (span,) = await _spans(exporter, 1)
    assert span.name == "text_completion fake"
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    assert span.parent.is_remote


@pytest.mark.parametrize("sent", ["", "nonsense", TRACEPARENT.upper() + "x", f"00-{'0' * 32}-{PARENT_ID}-01"])
async def test_a_traceparent_that_is_none_does_not_matter(traced, exporter, sent):
    server = await traced()
    reply = await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, headers={"traceparent": sent})
    assert reply.status == 200
    (span,) = await _spans(exporter, 1)
    assert span.parent is None


async def test_what_its_parent_did_not_sample_is_not_sampled(traced, exporter):
    server = await traced()
    unsampled = {"traceparent": TRACEPARENT[:-1] + "0"}
    await server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, headers=unsampled)
    await server.complete(max_tokens=1)
    (span,) = await _spans(exporter, 1)
    assert span.parent is None


async def test_every_prompt_of_a_call_has_a_span_under_the_same_parent(traced, exporter):
    server = await traced()
    body = {"prompt": ["one", "three"], "max_tokens": 2}
    reply = await server.post("/v1/completions", body, headers={"traceparent": TRACEPARENT})
    spans = await _spans(exporter, 2)
    assert {f"{span.parent.span_id:016x}" for span in spans} == {PARENT_ID}
    assert sum(span.attributes["gen_ai.usage.input_tokens"] for span in spans) == reply.json["usage"]["prompt_tokens"]


def test_events_stand_where_each_part_began():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider, clock=lambda: 100_000_000_000)
    timings = Timings(queue_s=1.5, prefill_s=2.0, decode_s=4.0, e2e_s=7.5, ttft_s=3.5)
    spans.begin(_call(), {})
    spans.end(Finished("r", FinishReason.STOP, (FinishReason.STOP,), Usage(3, 2), timings))
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (92_500_000_000, 100_000_000_000)
    assert [(event.name, event.timestamp) for event in span.events] == [
        ("lockstep.queue", 92_500_000_000),
        ("lockstep.prefill", 94_000_000_000),
        ("lockstep.first_token", 96_000_000_000),
    ]
    provider.shutdown()


async def test_a_gone_client_leaves_a_span_of_what_was_done_for_it(traced, exporter):
    server = await traced(FakeBackend(delay_s=0.002), n_slots=1, max_len=200_000)
    body = {"prompt": "Hello", "max_tokens": 100_000, "stream": True}
    (reader, running), (_, waiting) = [await server.open("/v1/completions", body) for _ in range(2)]
    await reader.readuntil(b"data:")
    await until(lambda: server.engine.num_waiting == 1)
    reset(waiting)
    (never_ran,) = await _spans(exporter, 1)
    reset(running)
    _, ran = await _spans(exporter, 2)
    for span in (never_ran, ran):
        assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
        assert span.attributes["gen_ai.request.stream"]
    assert ran.attributes["gen_ai.usage.output_tokens"] > 0
    assert [event.name for event in ran.events] == ["lockstep.queue", "lockstep.prefill", "lockstep.first_token"]
    assert [event.name for event in never_ran.events] == ["lockstep.queue"]
    assert never_ran.attributes["gen_ai.usage.input_tokens"] == 0


async def test_a_failed_request_is_a_span_with_an_error(traced, exporter):
    server = await traced(FakeBackend(fault=lambda _work: RowError("the server failed here", ValueError("why"))))
    assert (await server.complete(max_tokens=2)).status == 500
    (span,) = await _spans(exporter, 1)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the server failed here")
    assert span.attributes["error.type"] == "ValueError"


async def test_what_was_refused_or_not_wholly_submitted_leaves_no_span(traced, exporter):
    server = await traced(FakeBackend(delay_s=0.002), n_slots=1, max_queue=1)
    running = asyncio.create_task(server.complete(max_tokens=100, ignore_eos=True))
    await until(lambda: server.engine.num_running == 1)
    assert (await server.complete(["one", "two"], max_tokens=2)).status == 429
    assert (await server.complete("x" * 1000)).status == 400
    assert (await running).status == 200
    await _spans(exporter, 1)
    assert not server.service.tracing._begun


def _call():
    return Call(
        id="r",
        operation="chat",
        model="fake",
        requests=(Request(id="r", prompt_ids=(1, 2, 3), params=SamplingParams()),),
        stream=False,
        include_usage=False,
        continuous_usage=False,
        return_token_ids=False,
    )
