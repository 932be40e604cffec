import asyncio
import contextlib
import json
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engine.batch import RowError
from engine.errors import CacheError
from engine.params import SamplingParams
from scheduler.request import Request
from scheduler.serve.jsonl.lines import LineWriter
from scheduler.serve.jsonl.server import JsonlServer
from scheduler.serve.keys import ApiKeys
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.socket import FinishedEvent, SocketEvent
from tests.fakes import ByteTokenizer, FakeBackend, solo
from tests.live_server import strict_json
from tests.scheduler.serve import rig
from tests.scheduler.serve.rig import HANG_GUARD_S, MAX_LEN, reset, until


class Client:
    """One connection to the JSON socket."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    async def send(self, *lines):
        for line in lines:
            self.writer.write((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
        await self.writer.drain()

    async def event(self):
        """The next event; None when the server has closed the connection. Empty lines mean nothing."""
        async with asyncio.timeout(HANG_GUARD_S):
            while line := await self.reader.readline():
                if line != b"\n":
                    msgspec.json.decode(line, type=SocketEvent)
                    return strict_json(line)
        return None

    async def events(self):
        """Every event until the server closes the connection."""
        found = []
        while (event := await self.event()) is not None:
            found.append(event)
        return found

    async def until_end(self, *ids):
        """Every event up to the one that ends the last of the requests `ids`."""
        found, open_ids = [], set(ids)
        while open_ids:
            event = await self.event()
            assert event is not None, found
            found.append(event)
            if event["event"] in {"finished", "error"}:
                open_ids.discard(event["id"])
        return found


class Gate:
    """A backend that computes nothing until it is let."""

    def __init__(self):
        self._opened = threading.Event()
        self.open = self._opened.set
        self.backend = FakeBackend(fault=self._wait)

    def _wait(self, _work):
        self._opened.wait(HANG_GUARD_S)


class Socket:
    """The JSON socket beside a rig's HTTP server."""

    def __init__(self, server, address):
        self.engine = server.engine
        self.idle = server.idle
        self._address = address
        self._clients = []

    async def connect(self):
        if isinstance(self._address, Path):
            client = Client(*await asyncio.open_unix_connection(self._address))
        else:
            client = Client(*await asyncio.open_connection("127.0.0.1", self._address))
        self._clients.append(client)
        return client

    def close(self):
        for client in self._clients:
            client.writer.close()


@contextlib.asynccontextmanager
async def running(*, path=None, backend=None, settings=None, **options):
    """A JSON socket; `settings` are fields of `ServeSettings`, `options` those of the rig."""
    async with rig.serve(backend, **options) as server:
        given = ServeSettings(model=Path("fake.gguf"), **(settings or {}))
        jsonl = JsonlServer(server.service, given, ApiKeys(given.api_key))
        if path is None:
            listening = await asyncio.start_server(jsonl, "127.0.0.1", 0)
            address = listening.sockets[0].getsockname()[1]
        else:
            listening, address = await asyncio.start_unix_server(jsonl, path), path
        socket = Socket(server, address)
        socket.server = jsonl
        try:
            yield socket
        finally:
            listening.close()
            socket.close()
            await jsonl.close(1)


@pytest.fixture(params=["tcp", "unix"])
async def socket(request, tmp_path):
    async with running(path=tmp_path / "s" if request.param == "unix" else None) as socket:
        yield socket


@pytest.fixture
async def client(socket):
    return await socket.connect()


def _generate(client_id="a", **fields):
    return {"op": "generate", "id": client_id, "max_tokens": 8, "temperature": 0, **fields}


def _text(events, client_id="a", index=0):
    return "".join(e["text"] for e in events if e["event"] == "text" and (e["id"], e["index"]) == (client_id, index))


def _expected(prompt, **params):
    params = {"max_tokens": 8, "temperature": 0, **params}
    request = Request(id="x", prompt_ids=tuple(ByteTokenizer().encode(prompt)), params=SamplingParams(**params))
    return solo(request, max_len=MAX_LEN)[1]


async def test_a_request_is_started_then_text_then_finished(client):
    await client.send(_generate(prompt="Hello", seed=7))
    events = await client.until_end("a")
    started, *texts, finished = events
    assert started["event"] == "started"
    assert (started["prompt_tokens"], started["seed"], started["model"]) == (5, 7, "fake")
    assert started["system_fingerprint"] == "fp_fake"
    assert all(event["event"] == "text" for event in texts)
    assert _text(events) == _expected("Hello")
    assert sum(len(event["token_ids"]) for event in texts) == 8
    assert finished["event"] == "finished"
    assert finished["finish_reason"] == "length"
    assert finished["choices"] == [{"index": 0, "finish_reason": "length", "stop_reason": None, "completion_tokens": 8}]
    assert (finished["usage"]["prompt_tokens"], finished["usage"]["completion_tokens"]) == (5, 8)


async def test_token_ids_are_taken_as_they_are(client):
    await client.send(_generate(prompt=list(b"Hello")))
    assert _text(await client.until_end("a")) == _expected("Hello")


async def test_messages_go_through_the_template(client):
    await client.send(_generate(messages=[{"role": "user", "content": "Hi<|im_end|>"}]))
    started = (await client.until_end("a"))[0]
    assert started["prompt_tokens"] == len("user\nHi<|im_end|>") + len("\nassistant\n") + 3


async def test_many_requests_share_a_connection_and_each_gets_its_own_text(client):
    prompts = {f"r{i}": f"prompt {i}" for i in range(10)}
    await client.send(*(_generate(client_id, prompt=prompt) for client_id, prompt in prompts.items()))
    events = await client.until_end(*prompts)
    for client_id, prompt in prompts.items():
        assert _text(events, client_id) == _expected(prompt)
        assert [e["event"] for e in events if e["id"] == client_id].count("finished") == 1


async def test_choices_are_told_apart_by_their_index(client):
    await client.send(_generate(prompt="Hello", n=3, temperature=1, seed=5))
    events = await client.until_end("a")
    texts = [_text(events, index=index) for index in range(3)]
    assert len(set(texts)) == 3
    assert [choice["index"] for choice in events[-1]["choices"]] == [0, 1, 2]
    assert events[-1]["usage"] | {"prompt_tokens": 5, "completion_tokens": 24} == events[-1]["usage"]


async def test_a_stop_string_is_named_and_never_sent(client):
    stop = _expected("Hello")[2:5]
    await client.send(_generate(prompt="Hello", stop=[stop]))
    events = await client.until_end("a")
    assert _text(events) == _expected("Hello").partition(stop)[0]
    assert (events[-1]["finish_reason"], events[-1]["choices"][0]["stop_reason"]) == ("stop", stop)


async def test_logprobs_come_with_the_tokens_they_belong_to(client):
    await client.send(_generate(prompt="Hello", logprobs=2, prompt_logprobs=1))
    events = await client.until_end("a")
    for event in (e for e in events if e["event"] == "text"):
        assert [entry["bytes"] for entry in event["logprobs"]] == [[token_id] for token_id in event["token_ids"]]
        assert all(len(entry["top_logprobs"]) == 2 for entry in event["logprobs"])
    assert len(events[-1]["prompt_logprobs"]) == 5


async def test_an_integer_is_an_id_too_and_comes_back_as_one(client):
    await client.send(_generate(17, prompt="Hello"))
    assert {event["id"] for event in await client.until_end(17)} == {17}


async def test_cancel_ends_one_request_and_leaves_the_others(client):
    await client.send(_generate("long", prompt="Hello", max_tokens=None), _generate("short", prompt="Hello"))
    await client.send({"op": "cancel", "id": "long"})
    events = await client.until_end("long", "short")
    finished = {event["id"]: event["finish_reason"] for event in events if event["event"] == "finished"}
    assert finished == {"long": "abort", "short": "length"}


async def test_cancel_while_waiting_for_a_slot_is_answered_too():
    gate = Gate()
    async with running(n_slots=1, backend=gate.backend) as socket:
        client = await socket.connect()
        await client.send(_generate("runs", prompt="Hello"), _generate("waits", prompt="Hello"))
        await client.send({"op": "cancel", "id": "waits"})
        events = await client.until_end("waits")
        gate.open()
        assert events[-1]["finish_reason"] == "abort"
        assert [event["event"] for event in events if event["id"] == "waits"] == ["finished"]
        assert _text(await client.until_end("runs"), "runs") == _expected("Hello")


async def test_cancel_of_an_id_that_is_not_running_is_no_error(client):
    await client.send({"op": "cancel", "id": "nobody"}, _generate(prompt="Hello"))
    assert all(event["id"] == "a" for event in await client.until_end("a"))
    await client.send({"op": "cancel", "id": "a"}, {"op": "cancel", "id": "a"}, _generate("b", prompt="Hello"))
    assert all(event["id"] == "b" for event in await client.until_end("b"))


async def test_an_id_in_use_is_refused_without_ending_its_request(client):
    await client.send(_generate(prompt="Hello", max_tokens=100), _generate(prompt="Other"))
    await client.send({**_generate(), "temperature": -1})
    events = await client.until_end("a")
    refusals = [event for event in events if event["event"] == "error"]
    assert [refusal["id"] for refusal in refusals] == [None, None]
    assert refusals[0]["error"]["param"] == "id"
    assert _text(events) == _expected("Hello", max_tokens=100)


async def test_an_id_may_be_used_again_once_its_request_has_ended(client):
    for _ in range(3):
        await client.send(_generate(prompt="Hello"))
        assert _text(await client.until_end("a")) == _expected("Hello")


@pytest.mark.parametrize(
    ("line", "client_id", "param"),
    [
        (b"nope", None, None),
        (b"{", None, None),
        (b"[]", None, None),
        (b"null", None, None),
        (b"{}", None, "op"),
        (b'{"op":"dance","id":"a"}', "a", "op"),
        (b'{"op":"generate","prompt":"x"}', None, "id"),
        (b'{"op":"generate","id":"","prompt":"x"}', None, "id"),
        (b'{"op":"generate","id":1.5,"prompt":"x"}', None, "id"),
        (b'{"op":"generate","id":"a"}', "a", "prompt"),
        (b'{"op":"generate","id":"a","prompt":""}', "a", "prompt"),
        (b'{"op":"generate","id":"a","prompt":[]}', "a", "prompt"),
        (b'{"op":"generate","id":"a","prompt":[1.5]}', "a", "prompt"),
        (b'{"op":"generate","id":"a","prompt":[true]}', "a", "prompt"),
        (b'{"op":"generate","id":"a","prompt":[258]}', "a", "prompt"),
        (b'{"op":"generate","id":"a","prompt":[-1]}', "a", "prompt"),
        (b'{"op":"generate","id":"a","prompt":"x","messages":[]}', "a", "prompt"),
        (b'{"op":"generate","id":"a","messages":[]}', "a", "messages"),
        (b'{"op":"generate","id":"a","messages":[{"role":"king","content":"x"}]}', "a", "messages"),
        (b'{"op":"generate","id":"a","messages":[{"role":"user","content":"refuse me"}]}', "a", "messages"),
        (b'{"op":"generate","id":"a","messages":[{"role":"user","content":"x"}],"max_tokens":0}', "a", "max_tokens"),
        (b'{"op":"generate","id":"a","prompt":"x","temperature":NaN}', None, "temperature"),
        (b'{"op":"generate","id":"a","prompt":"x","temperature":-1}', "a", "temperature"),
        (b'{"op":"generate","id":"a","prompt":"x","n":0}', "a", "n"),
        (b'{"op":"generate","id":"a","prompt":"x","stop":[""]}', "a", "stop"),
        (b'{"op":"generate","id":"a","prompt":"x","logprobs":99}', "a", "logprobs"),
        (b'{"op":"generate","id":"a","prompt":"x","model":"other"}', "a", "model"),
        (b'{"op":"generate","id":"a","prompt":"x","tools":[1]}', "a", "tools"),
        (b'{"op":"generate","id":"a","prompt":"\xff"}', "a", None),
        (b'{"op":"generate","id":"a","prompt":"\\ud800"}', None, "prompt"),
        (b'{"op":"generate","id":"a","prompt":"x"}{}', None, None),
        (b'{"op":"generate","id":"a","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", None, None),
    ],
)
async def test_a_bad_line_is_refused_by_name_and_the_connection_lives_on(line, client_id, param):
    async with running() as socket:
        client = await socket.connect()
        await client.send(line)
        refusal = await client.event()
        assert refusal["event"] == "error", refusal
        assert refusal["id"] == client_id
        assert set(refusal["error"]) == {"message", "type", "param", "code"}
        assert refusal["error"]["param"] == param, refusal
        assert socket.engine.metrics.num_requests == 0
        await client.send(_generate("good", prompt="Hello"))
        assert _text(await client.until_end("good"), "good") == _expected("Hello")


async def test_a_prompt_that_fills_the_context_is_refused_naming_both_numbers(client):
    await client.send(_generate(prompt=[65] * MAX_LEN))
    error = (await client.event())["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_LEN) in error["message"]


async def test_a_full_queue_refuses_at_once_and_only_the_request_too_many():
    gate = Gate()
    async with running(n_slots=1, max_queue=2, backend=gate.backend) as socket:
        client = await socket.connect()
        await client.send(*(_generate(i, prompt="Hello") for i in range(5)))
        refused = [event for event in await client.until_end(3, 4) if event["event"] == "error"]
        assert [(event["id"], event["error"]["code"]) for event in refused] == [(3, "queue_full"), (4, "queue_full")]
        gate.open()
        events = await client.until_end(0, 1, 2)
        assert all(_text(events, i) == _expected("Hello") for i in range(3))


async def test_a_draining_server_takes_nothing_new_and_finishes_what_runs():
    async with running(backend=FakeBackend(delay_s=0.01)) as socket:
        client = await socket.connect()
        await client.send(_generate("old", prompt="Hello"))
        assert (await client.event())["event"] == "started"
        socket.engine.drain()
        await client.send(_generate("new", prompt="Hello"))
        events = await client.until_end("old", "new")
        ends = {event["id"]: event["event"] for event in events if event["event"] in {"finished", "error"}}
        assert ends == {"old": "finished", "new": "error"}


async def test_a_request_that_fails_ends_with_an_error_and_the_others_go_on():
    def fault(work):
        failing = work.sequence.request.prompt_ids == tuple(b"bad") and len(work.sequence.output_ids) == 3
        return RowError("the sampler has failed", ValueError("secret")) if failing else None

    async with running(backend=FakeBackend(fault=fault)) as socket:
        client = await socket.connect()
        await client.send(_generate("bad", prompt="bad"), _generate("good", prompt="good"))
        events = await client.until_end("bad", "good")
        (error,) = [event for event in events if event["event"] == "error"]
        assert error["id"] == "bad"
        assert error["error"]["type"] == "server_error"
        assert "secret" not in json.dumps(events)
        assert _text(events, "good") == _expected("good")
        await socket.idle()


@pytest.mark.parametrize("fault", [KeyError, CacheError])
async def test_a_request_that_cannot_be_prepared_by_a_fault_of_ours_ends_alone_and_is_logged(fault):
    class Broken(rig.FakeTemplate):
        def render(self, *_args, **_kwargs):
            raise fault("secret internals")

    async with running(template=Broken()) as socket:
        client = await socket.connect()
        with capture_logs() as logged:
            await client.send(
                {"op": "generate", "id": "good", "prompt": "Hi", "max_tokens": 2},
                {"op": "generate", "id": "bad", "messages": [{"role": "user", "content": "Hi"}]},
            )
            events = await client.until_end("good", "bad")
    (error,) = [event for event in events if event["event"] == "error"]
    assert (error["id"], error["error"]["code"]) == ("bad", "internal_error")
    assert "secret" not in str(events)
    assert [line["event"] for line in logged if line["log_level"] == "error"] == ["request failed"]


async def test_a_request_that_takes_too_long_ends_with_an_error_and_frees_its_slot():
    options = {"backend": FakeBackend(delay_s=0.02), "settings": {"request_timeout": 0.1}}
    async with running(**options) as socket:
        client = await socket.connect()
        await client.send(_generate(prompt="Hello", max_tokens=None))
        assert (await client.until_end("a"))[-1]["error"]["code"] == "request_timeout"
        await socket.idle()
        await client.send(_generate(prompt="Hi", max_tokens=1))
        assert (await client.until_end("a"))[-1]["event"] == "finished"


async def test_nothing_follows_the_last_event_however_late_its_client_takes_it(monkeypatch):
    send = LineWriter.send

    async def send_and_wait(writer, line):
        await send(writer, line)
        if isinstance(line, FinishedEvent):
            await asyncio.sleep(0.4)  # as if the client did not read, for twice the time limit

    monkeypatch.setattr(LineWriter, "send", send_and_wait)
    async with running(backend=FakeBackend(), settings={"request_timeout": 0.2}) as socket:
        client = await socket.connect()
        await client.send(_generate(prompt="Hello"))
        assert (await client.until_end("a"))[-1]["event"] == "finished"
        await client.send(_generate(prompt="Again"))
        client.writer.write_eof()
        again = await client.events()
        assert [event["event"] for event in again if event["event"] != "text"] == ["started", "finished"]
        assert _text(again) == _expected("Again")


async def test_a_client_that_has_sent_all_still_gets_all_its_answers(client):
    await client.send(_generate("a", prompt="Hello"), _generate("b", prompt="Other"))
    client.writer.write(json.dumps(_generate("c", prompt="No newline")).encode())
    client.writer.write_eof()
    events = await client.events()
    for client_id, prompt in (("a", "Hello"), ("b", "Other"), ("c", "No newline")):
        assert _text(events, client_id) == _expected(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding"])
async def test_a_client_that_goes_away_frees_its_slots(how, phase):
    async with running(n_slots=1, backend=FakeBackend(delay_s=0.05)) as socket:
        other = await socket.connect()
        if phase == "waiting":
            await other.send(_generate(prompt="Hello", max_tokens=30))
            assert (await other.event())["event"] == "started"
        client = await socket.connect()
        prompt = "long " * 40 if phase == "prefilling" else "Hello"
        await client.send(_generate(prompt=prompt, max_tokens=None), _generate("b", prompt="x", max_tokens=None))
        expected = {"waiting": (1, 2), "prefilling": (1, 1), "decoding": (1, 1)}[phase]
        await until(lambda: (socket.engine.num_running, socket.engine.num_waiting) == expected)
        if phase == "decoding":
            await until(lambda: socket.engine.metrics.generation_tokens > 0)
        if how == "close":
            client.writer.close()
        else:
            reset(client.writer)
        left = (1, 0) if phase == "waiting" else (0, 0)
        await until(lambda: (socket.engine.num_running, socket.engine.num_waiting) == left)
        if phase == "waiting":
            assert _text(await other.until_end("a")) == _expected("Hello", max_tokens=30)


@pytest.mark.slow
async def test_a_client_that_does_not_read_loses_its_connection_and_nobody_elses():
    slow = {"settings": {"write_timeout": 0.2}, "max_len": 200_000}
    async with running(backend=FakeBackend(), **slow) as socket:
        deaf, other = await socket.connect(), await socket.connect()
        deaf.reader._limit = 1
        deaf.writer.transport.pause_reading()
        await deaf.send(*(_generate(i, prompt="Hello", max_tokens=None, logprobs=20) for i in range(3)))
        await other.send(_generate(prompt="Hello"))
        assert _text(await other.until_end("a")) == _expected("Hello")
        await socket.idle()
        assert socket.engine.metrics.num_finished["abort"] == 3


async def test_a_line_too_long_is_refused_and_ends_the_connection():
    async with running(settings={"max_body": 1000}) as socket:
        client = await socket.connect()
        await client.send(_generate("x", prompt="y", max_tokens=None))
        assert (await client.event())["event"] == "started"
        await client.send(b"x" * 1001)
        last = (await client.events())[-1]
        assert (last["id"], last["error"]["code"]) == (None, "line_too_long")
        await socket.idle()


async def test_a_line_of_exactly_the_limit_is_taken():
    async with running(settings={"max_body": 1000}) as socket:
        client = await socket.connect()
        line = json.dumps(_generate(prompt="Hello")).encode()
        await client.send(line + b" " * (1000 - len(line)))
        assert _text(await client.until_end("a")) == _expected("Hello")


async def test_a_line_that_does_not_arrive_whole_in_time_ends_the_connection():
    async with running(settings={"body_timeout": 0.1}) as socket:
        client = await socket.connect()
        await asyncio.sleep(0.2)
        await client.send(_generate(prompt="Hello"))
        assert (await client.until_end("a"))[-1]["event"] == "finished", "silence between lines is no fault"
        client.writer.write(b'{"op":')
        assert (await client.events())[-1]["error"]["code"] == "line_timeout"


async def test_where_a_key_is_needed_who_says_nothing_loses_the_connection():
    async with running(settings={"body_timeout": 0.1, "api_key": ("k",)}) as socket:
        silent, known = await socket.connect(), await socket.connect()
        await known.send({"op": "auth", "key": "k"})
        assert (await silent.events())[-1]["error"]["code"] == "line_timeout"
        await asyncio.sleep(0.15)
        await known.send(_generate(prompt="Hello"))
        assert (await known.until_end("a"))[-1]["event"] == "finished"


async def test_a_line_may_arrive_byte_by_byte(client):
    for byte in json.dumps(_generate(prompt="Hé")).encode() + b"\r\n":
        client.writer.write(bytes([byte]))
        await client.writer.drain()
        await asyncio.sleep(0)
    assert _text(await client.until_end("a")) == _expected("Hé")


async def test_what_a_browser_sends_ends_the_connection_before_any_line_of_the_pages_choice(client, socket):
    body = json.dumps(_generate(prompt="Hello")).encode()
    await client.send(b"POST / HTTP/1.1", b"Host: localhost", b"", body)
    (refusal,) = await client.events()
    assert "HTTP" in refusal["error"]["message"]
    assert socket.engine.metrics.num_requests == 0


async def test_one_connection_too_many_is_told_so_and_the_next_one_is_welcome():
    async with running(settings={"max_connections": 1}) as socket:
        first, second = await socket.connect(), await socket.connect()
        await first.send(_generate(prompt="Hello"))
        await first.until_end("a")
        (refusal,) = await second.events()
        assert "1 connections" in refusal["error"]["message"]
        first.writer.close()
        third = await socket.connect()
        while (await third.event()) is not None:
            third = await socket.connect()
            await third.send(_generate(prompt="Hello"))
            if (await third.event())["event"] == "started":
                break


KEYS = {"settings": {"api_key": ("one", "zwei€")}}


@pytest.mark.parametrize("key", ["one", "zwei€"])
async def test_a_valid_key_opens_the_socket(key):
    async with running(**KEYS) as socket:
        client = await socket.connect()
        await client.send({"op": "auth", "key": key}, _generate(prompt="Hello"))
        assert _text(await client.until_end("a")) == _expected("Hello")


@pytest.mark.parametrize(
    "line",
    [
        {"op": "auth", "key": "wrong"},
        {"op": "auth", "key": ""},
        {"op": "auth", "key": "one "},
        {"op": "cancel", "id": "a"},
        _generate(prompt="Hello"),
        b"nope",
    ],
)
async def test_without_a_valid_key_the_connection_ends_and_nothing_has_run(line):
    async with running(**KEYS) as socket:
        client = await socket.connect()
        await client.send(line, _generate(prompt="Hello"))
        (refusal,) = await client.events()
        assert (refusal["id"], refusal["error"]["code"]) == (None, "invalid_api_key")
        assert socket.engine.metrics.num_requests == 0


async def test_a_key_where_none_is_needed_is_no_error(client):
    await client.send({"op": "auth", "key": "whatever"}, _generate(prompt="Hello"))
    assert all(event["id"] == "a" for event in await client.until_end("a"))


async def test_closing_the_server_sends_the_last_events_and_then_hangs_up():
    async with running(backend=FakeBackend(delay_s=0.01)) as socket:
        client, idle = await socket.connect(), await socket.connect()
        await client.send(_generate(prompt="Hello", max_tokens=None))
        assert (await client.event())["event"] == "started"
        await socket.engine.stop()
        await socket.server.close(HANG_GUARD_S)
        events = await client.events()
        assert (events[-1]["event"], events[-1]["finish_reason"]) == ("finished", "abort")
        assert await idle.events() == []


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_fields = st.sampled_from(
    ["op", "id", "prompt", "messages", "n", "stop", "seed", "logit_bias", "temperature", "max_tokens", "key", "model"]
)
_ops = st.sampled_from(["generate", "cancel", "auth"])
_lines = st.one_of(
    st.binary(max_size=60),
    st.dictionaries(_fields, _values, max_size=5).map(lambda d: json.dumps(d).encode("utf-8", "surrogatepass")),
    st.builds(
        lambda op, extra: json.dumps({"op": op, "id": "a", "prompt": "x", "max_tokens": 2} | extra).encode(),
        _ops,
        st.dictionaries(_fields.filter(lambda name: name != "op"), _values, max_size=2),
    ),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(_lines, max_size=6), ending=st.sampled_from([b"\n", b"\r\n", b""]))
def test_whatever_is_sent_every_event_is_strict_json_and_the_server_goes_on(lines, ending):
    async def scenario():
        async with running() as socket:
            client = await socket.connect()
            client.writer.write((ending or b"\n").join(lines) + ending)
            client.writer.write_eof()
            for event in await client.events():
                assert event["event"] in {"started", "text", "finished", "error"}
                if event["event"] == "error":
                    assert event["error"]["type"] != "server_error", event
            good = await socket.connect()
            await good.send(_generate(prompt="Hello"))
            assert _text(await good.until_end("a")) == _expected("Hello")
            await socket.idle()

    asyncio.run(scenario())
