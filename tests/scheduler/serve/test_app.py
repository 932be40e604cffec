import asyncio
import contextlib
import gc
import itertools
import json
import os
import resource
import signal
import socket
import threading
from pathlib import Path

import aiohttp
import pytest
import structlog

from engine.errors import ModelFileError
from scheduler.core import Scheduler
from scheduler.serve import app
from scheduler.serve.app import Server, serve
from scheduler.serve.listen import ListenError
from scheduler.serve.load import Loaded, context_of
from scheduler.serve.settings import ServeSettings
from tests.fakes import ByteTokenizer, FakeBackend
from tests.live_server import parse_sse, strict_json
from tests.scheduler.serve.rig import FakeTemplate, until


def _settings(**fields):
    return ServeSettings(model=Path("fake.gguf"), port=0, **fields)


def _load(backend=None, before=lambda: None, n_slots=2, max_len=256):
    """A `load` that needs no file; `before` is called in the loading thread."""

    def load(settings):
        before()
        tokenizer = ByteTokenizer()
        scheduler = Scheduler(
            n_slots=n_slots,
            max_len=max_len,
            prefill_chunk=settings.prefill_chunk,
            max_queue=settings.max_queue,
            eos_ids=tokenizer.eos_ids,
        )
        return Loaded(scheduler, backend or FakeBackend(), tokenizer, FakeTemplate(), max_len, "fp_fake")

    return load


@contextlib.asynccontextmanager
async def _serving(load=None, **fields):
    async with Server(_settings(**fields)) as server:
        await server.start(load or _load())
        yield server


async def _get(server, path):
    async with aiohttp.ClientSession() as session, session.get(server.url + path) as response:
        return response.status, await response.read()


async def _complete(server, **fields):
    body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, **fields}
    async with aiohttp.ClientSession() as session, session.post(server.url + "/v1/completions", json=body) as response:
        return response.status, await response.read()


async def test_until_the_model_is_loaded_every_call_is_answered_503_and_then_200():
    loaded = threading.Event()
    async with Server(_settings()) as server:
        starting = asyncio.create_task(server.start(_load(before=loaded.wait)))
        assert (await _get(server, "/health"))[0] == 503
        assert (await _get(server, "/v1/models"))[0] == 503
        assert (await _complete(server))[0] == 503
        loaded.set()
        await starting
        assert (await _get(server, "/health"))[0] == 200
        assert (await _complete(server))[0] == 200


async def test_json_socket_clients_that_come_while_loading_are_answered_after_it(tmp_path):
    loaded = threading.Event()
    async with Server(_settings(jsonl_port=0, unix_socket=tmp_path / "s")) as server:
        starting = asyncio.create_task(server.start(_load(before=loaded.wait)))
        tcp = await asyncio.open_connection("127.0.0.1", server.jsonl_port)
        unix = await asyncio.open_unix_connection(tmp_path / "s")
        for _, writer in (tcp, unix):
            writer.write(b'{"op":"generate","id":1,"prompt":"Hello","max_tokens":1}\n')
        loaded.set()
        await starting
        for reader, writer in (tcp, unix):
            assert json.loads(await reader.readline())["event"] == "started"
            writer.close()


async def test_what_is_ready_says_where(tmp_path):
    async with _serving(jsonl_port=0, unix_socket=tmp_path / "s", served_model_name=("smol",)) as server:
        assert server.ready == {
            "event": "ready",
            "url": f"http://127.0.0.1:{server.port}",
            "host": "127.0.0.1",
            "port": server.port,
            "jsonl_port": server.jsonl_port,
            "unix_socket": str(tmp_path / "s"),
            "model": "smol",
            "pid": os.getpid(),
        }


@pytest.mark.parametrize(("host", "local"), [("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")])
async def test_the_url_is_one_this_machine_can_open(host, local):
    async with _serving(host=host, api_key=("k",)) as server:
        assert server.url == f"http://{local}:{server.port}"
        assert (await _get(server, "/health"))[0] == 200


async def test_a_public_host_without_a_key_is_warned_of():
    with structlog.testing.capture_logs() as captured:
        for fields in ({"host": "0.0.0.0"}, {"host": "0.0.0.0", "api_key": ("k",)}, {}):
            async with Server(_settings(**fields)):
                pass
    assert [(line["log_level"], line["host"]) for line in captured] == [("warning", "0.0.0.0")]


async def test_every_request_is_logged_once_without_its_text():
    with structlog.testing.capture_logs() as captured:
        async with _serving() as server:
            await _complete(server, prompt="very private")
            async with aiohttp.ClientSession() as session:
                body = {"prompt": "very private", "stream": True}
                async with session.post(server.url + "/v1/completions", json=body) as response:
                    await response.content.readline()
    requests = [line for line in captured if line["event"] == "request"]
    assert sorted(line["reason"] for line in requests) == ["abort", "length"]
    assert "private" not in repr(captured)


async def test_a_failed_load_closes_every_socket_and_says_why(tmp_path):
    def load(_settings):
        raise ModelFileError("fake.gguf", "it is broken")

    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(_settings(jsonl_port=0, unix_socket=tmp_path / "s")))
        ports = server.port, server.jsonl_port
        with pytest.raises(ModelFileError, match=r"fake\.gguf: it is broken"):
            await server.start(load)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
    assert not (tmp_path / "s").exists()


async def test_a_socket_that_cannot_be_opened_closes_those_that_could(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}: address already in use"):
            async with Server(_settings(unix_socket=tmp_path / "s", jsonl_port=port)):
                raise AssertionError("it must not start")
    (tmp_path / "s").write_text("precious")
    with pytest.raises(ListenError, match="not a socket"):
        async with Server(_settings(unix_socket=tmp_path / "s")):
            raise AssertionError("it must not start")
    assert (tmp_path / "s").read_text() == "precious"


async def test_draining_finishes_what_runs_and_refuses_what_is_new():
    async with _serving(_load(FakeBackend(delay_s=0.01)), grace=60) as server:
        running = asyncio.create_task(_complete(server, stream=True, max_tokens=30))
        await until(lambda: server.num_unfinished == 1)
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0)
        assert (await _complete(server))[0] == 503
        assert (await _get(server, "/health"))[0] == 503
        await draining
        status, body = await running
    assert status == 200
    assert parse_sse(body).finish_reasons() == ["length"]


async def test_what_is_unfinished_is_told_in_requests_and_in_their_choices():
    async with _serving(_load(FakeBackend(delay_s=0.01)), grace=0) as server:
        call = asyncio.create_task(_complete(server, n=3, max_tokens=None, ignore_eos=True))
        await until(lambda: server.num_unfinished == 1)
        assert server.unfinished == {"requests": 1, "running": 2, "waiting": 1}
        await server.drain()
    await call


async def test_what_outlasts_the_grace_is_aborted_with_its_terminal_events(tmp_path):
    async with _serving(_load(FakeBackend(delay_s=0.05)), grace=0.05, unix_socket=tmp_path / "s") as server:
        streamed = asyncio.create_task(_complete(server, stream=True, max_tokens=None))
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(b'{"op":"generate","id":1,"prompt":"Hello"}\n')
        waiting = asyncio.create_task(_complete(server, stream=True))
        await until(lambda: server.num_unfinished == 3)
        await server.drain()
    assert parse_sse((await streamed)[1]).finish_reasons() == ["abort"]
    assert parse_sse((await waiting)[1]).finish_reasons() == ["abort"]
    lines = [json.loads(line) for line in (await reader.read()).splitlines() if line]
    assert (lines[-1]["event"], lines[-1]["finish_reason"]) == ("finished", "abort")
    writer.close()


async def test_metrics_tell_of_the_event_loop_too():
    async with _serving() as server:
        await asyncio.sleep(0.3)
        _, text = await _get(server, "/metrics")
        assert b'lockstep:event_loop_lag_seconds_count{model_name="fake"}' in text


async def test_serve_prints_one_line_when_ready_and_returns_zero_after_a_signal(capfd):
    async def stop_when_ready():
        while not (line := capfd.readouterr().out):  # noqa: ASYNC110 - stdout wakes nobody
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        return line

    stopping = asyncio.create_task(stop_when_ready())
    with structlog.testing.capture_logs() as logs:
        assert await serve(_settings(), _load()) == 0
    assert logs[-1]["event"] == "stopped"
    (line,) = (await stopping).splitlines()
    assert strict_json(line.encode())["event"] == "ready"


async def test_a_signal_while_the_model_loads_ends_the_server_without_waiting_for_it(capfd):
    release = threading.Event()

    def stop_and_go_on_loading():
        os.kill(os.getpid(), signal.SIGINT)
        release.wait()

    with structlog.testing.capture_logs() as logs:
        assert await serve(_settings(), _load(before=stop_and_go_on_loading)) == 0
    assert [entry["event"] for entry in logs] == ["stopped"]
    assert not release.is_set()
    release.set()
    assert capfd.readouterr().out == ""


async def test_an_engine_that_fails_ends_the_server_with_its_traceback_in_the_log(capfd):
    class BrokenScheduler(Scheduler):
        def update(self, _batch, _results, _now):
            raise RuntimeError("a broken invariant")

    def load(settings):
        loaded = _load()(settings)
        scheduler = BrokenScheduler(n_slots=1, max_len=64, prefill_chunk=8, max_queue=1, eos_ids=frozenset())
        return Loaded(scheduler, loaded.backend, loaded.tokenizer, loaded.template, 64, "fp_fake")

    async def call_when_ready():
        while not (line := capfd.readouterr().out):  # noqa: ASYNC110 - stdout wakes nobody
            await asyncio.sleep(0.01)
        url = json.loads(line)["url"] + "/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json={"prompt": "x"}) as response:
            return response.status, await response.read()

    with structlog.testing.capture_logs() as captured:
        calling = asyncio.create_task(call_when_ready())
        assert await serve(_settings(), load) == 1
    status, body = await calling
    assert status == 500
    assert b"broken invariant" not in body
    (critical,) = [line for line in captured if line["log_level"] == "critical"]
    assert str(critical["exc_info"]) == "a broken invariant"


@pytest.mark.parametrize(
    ("asked", "of_the_model", "granted"),
    [(None, 8192, 4096), (None, 2048, 2048), (512, 2048, 512), (4096, 2048, 2048), (8192, 8192, 8192)],
)
def test_the_context_is_never_more_than_the_models(asked, of_the_model, granted):
    assert context_of(_settings(context=asked), of_the_model) == granted


def test_a_context_that_had_to_be_lowered_is_warned_of():
    with structlog.testing.capture_logs() as captured:
        context_of(_settings(context=4096), 2048)
        context_of(_settings(context=2048), 2048)
    assert [(line["log_level"], line["asked"], line["context"]) for line in captured] == [("warning", 4096, 2048)]


@pytest.mark.slow
async def test_where_no_more_files_may_be_opened_the_log_is_not_filled_and_others_are_served_later(caplog):
    async with _serving(jsonl_port=0) as server:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        clients = [socket.socket()]
        lowest_free = clients[0].fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 16, allowed[1]))
        try:
            ports = itertools.cycle([server.port, server.jsonl_port])
            with pytest.raises(OSError, match="Too many open files"):
                clients.extend(socket.create_connection(("127.0.0.1", port)) for port in ports)
            await until(lambda: "out of system resource" in caplog.text)
            await asyncio.sleep(0.2)
            assert caplog.text.count("out of system resource") <= 4
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
            for client in clients:
                client.close()
        assert (await _get(server, "/health"))[0] == 200


@pytest.mark.parametrize("fault", [None, ValueError("a bad file")])
def test_collection_of_garbage_begins_once_the_model_is_loaded_and_leaves_that_out(monkeypatch, fault):
    def load(_settings):
        assert not gc.isenabled()
        if fault is not None:
            raise fault
        return "loaded"

    monkeypatch.setattr(app, "load", load)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            assert app._load_for_good(None) == "loaded"
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
