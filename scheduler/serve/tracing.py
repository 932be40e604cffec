"""Whether there are traces: only if the standard OpenTelemetry environment variables ask for them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import structlog

from scheduler.events import Finished

if TYPE_CHECKING:
    from scheduler.serve.call import Call

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"

_log: structlog.stdlib.BoundLogger = structlog.get_logger("lockstep.tracing")


class Tracing(Protocol):
    """What the server tells of its requests."""

    def begin(self, call: "Call", headers: Mapping[str, str]) -> None:
        """A call's requests have been submitted; `headers` came with it and may say which trace it is part of."""

    def end(self, finished: Finished) -> None:
        """A request has ended. Does nothing if it did not begin."""

    def close(self) -> None:
        """Send what has not been sent: takes as long as the receiver needs."""


def tracing_of(environ: Mapping[str, str]) -> Tracing | None:
    """Traces on their way to the OTLP endpoint named in `environ`, or None with a line in the log that says why not.

    No line, either, where none is named.
    """
    asked_by = next((name for name in ENDPOINTS if environ.get(name)), None)
    if asked_by is None or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), PROTOCOL)
    if protocol != PROTOCOL:
        _log.warning("no traces: they can be sent by one protocol only", asked=protocol, possible=PROTOCOL)
        return None
    try:
        from scheduler.serve.spans import Spans
    except ImportError:
        _log.warning("no traces: install lockstep-llm[otel] to send them", asked_by=asked_by)
        return None
    _log.info("sending traces", asked_by=asked_by)
    return Spans.to_otlp()
