"""One OpenTelemetry span for each prompt that was run.

Attributes are named by the GenAI semantic conventions (https://opentelemetry.io/docs/specs/semconv/gen-ai/): the model,
parameters, counts and reasons, never a text, nor a stop string. A span is made when its request has ended, from the
times the engine has taken: tokens on their way cost nothing.
"""

import importlib.metadata
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from scheduler.events import Finished
from scheduler.request import Request
from scheduler.serve.call import Call


class _Begun(NamedTuple):
    call: Call
    request: Request
    parent: Context


class Spans:
    """Spans of the requests that begin and end here, made by `provider`; `clock` is in nanoseconds since 1970."""

    def __init__(self, provider: TracerProvider, clock: Callable[[], int] = time.time_ns) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("lockstep", _version())
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()
        self._begun: dict[str, _Begun] = {}

    @classmethod
    def to_otlp(cls) -> Self:
        """Spans sent in a thread of their own: where to, as whom and how many of them is told by the environment."""
        given = OTELResourceDetector().detect().attributes
        resource = Resource.create({"service.name": "lockstep", "service.version": _version(), **given})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begin(self, call: Call, headers: Mapping[str, str]) -> None:
        """Remember what was asked. A W3C `traceparent` among `headers` is the spans' parent."""
        parent = self._propagator.extract(headers)
        for request in call.requests:
            self._begun[request.id] = _Begun(call, request, parent)

    def end(self, finished: Finished) -> None:
        """Make the span of a request, ending now."""
        begun = self._begun.pop(finished.request_id, None)
        if begun is None:
            return
        t_end = self._clock()
        timings = finished.timings
        t_arrival = t_end - _ns(timings.e2e_s)
        span = self._tracer.start_span(
            f"{begun.call.operation} {begun.call.model}",
            context=begun.parent,
            kind=SpanKind.SERVER,
            start_time=t_arrival,
            attributes=_asked(begun.call, begun.request),
        )
        span.add_event("lockstep.queue", timestamp=t_arrival)
        if timings.queue_s < timings.e2e_s:
            span.add_event("lockstep.prefill", timestamp=t_arrival + _ns(timings.queue_s))
        if timings.ttft_s is not None:
            span.add_event("lockstep.first_token", timestamp=t_arrival + _ns(timings.ttft_s))
        span.set_attributes(_answered(finished))
        if finished.error is not None:
            span.set_attribute("error.type", type(finished.cause).__name__ if finished.cause else "_OTHER")
            span.set_status(StatusCode.ERROR, finished.error)
        span.end(t_end)

    def close(self) -> None:
        """Send what has not been sent: takes as long as the receiver needs."""
        self._provider.shutdown()


def _asked(call: Call, request: Request) -> dict[str, AttributeValue]:
    params = request.params
    asked: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "lockstep",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": call.model,
        "gen_ai.request.stream": call.stream,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.response.id": call.id,
        "gen_ai.response.model": call.model,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _answered(finished: Finished) -> dict[str, AttributeValue]:
    return {
        "gen_ai.response.finish_reasons": [reason.value for reason in finished.choice_reasons],
        "gen_ai.usage.input_tokens": finished.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": finished.usage.completion_tokens,
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _version() -> str:
    return importlib.metadata.version("lockstep-llm")
