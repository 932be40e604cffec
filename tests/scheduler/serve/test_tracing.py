import http.server
import json
import sys
import threading

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from scheduler.serve import app
from scheduler.serve.app import Server
from scheduler.serve.tracing import tracing_of
from tests.scheduler.serve.test_app import _complete, _load, _settings


@pytest.fixture
def receiver():
    """An OTLP receiver: its address, and the path and the body of everything it has been sent."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_SERVICE_NAME": "llm"},
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nobody_who_did_not_ask_gets_traces_or_a_line_about_them(environ):
    with structlog.testing.capture_logs() as lines:
        assert tracing_of(environ) is None
    assert not lines


def test_without_the_extra_there_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "scheduler.serve.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    with structlog.testing.capture_logs() as lines:
        assert tracing_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    (line,) = lines
    assert "lockstep-llm[otel]" in line["event"]


def test_a_protocol_that_is_not_spoken_is_named():
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with structlog.testing.capture_logs() as lines:
        assert tracing_of(environ) is None
    (line,) = lines
    assert (line["asked"], line["possible"]) == ("grpc", "http/protobuf")


async def test_a_server_sends_its_spans_where_the_environment_says_before_it_ends(monkeypatch, receiver):
    address, received = receiver
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    async with Server(_settings()) as server:
        await server.start(_load())
        assert (await _complete(server))[0] == 200
    ((path, sent),) = received
    assert path == "/v1/traces"
    (of_resource,) = sent.resource_spans
    resource = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
    assert resource["service.name"] == "lockstep"
    (of_scope,) = of_resource.scope_spans
    (span,) = of_scope.spans
    assert span.name == "text_completion fake"


async def test_the_environment_names_the_service(monkeypatch, receiver):
    address, received = receiver
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{address}/here")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    async with Server(_settings()) as server:
        await server.start(_load())
        await _complete(server)
    ((path, sent),) = received
    assert path == "/here"
    assert b"mine" in sent.resource_spans[0].resource.SerializeToString()


async def test_a_receiver_that_is_not_there_harms_no_answer(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    async with Server(_settings()) as server:
        await server.start(_load())
        status, body = await _complete(server)
    assert (status, len(json.loads(body)["choices"])) == (200, 1)


async def test_a_receiver_that_takes_too_long_is_not_waited_for(monkeypatch):
    class Stuck:
        never = threading.Event()
        begin = end = staticmethod(lambda *_args: None)

        def close(self):
            self.never.wait()

    monkeypatch.setattr(app, "tracing_of", lambda _environ: Stuck())
    monkeypatch.setattr(app, "LAST_SPANS_S", 0.05)
    async with Server(_settings()) as server:
        await server.start(_load())
    assert not Stuck.never.is_set()
    Stuck.never.set()
