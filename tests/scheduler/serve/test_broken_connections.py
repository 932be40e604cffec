"""A thousand connections, each broken in one of the ways a client can break one, leave everything where it was."""

import asyncio
import contextlib
import gc
import itertools
import json
import random
import socket
from collections import Counter

import psutil
import pytest

from scheduler.serve.app import Server
from scheduler.serve.http.protocol import _Connection
from tests.fakes import FakeBackend
from tests.scheduler.serve.rig import http_post, reset, until
from tests.scheduler.serve.test_app import _load, _settings

pytestmark = pytest.mark.slow

SMALL_BUFFER = 4096
SLOTS = 4
AT_ONCE = 11
ROUNDS = 17
OWN_TASKS = 3
"""The test, the engine's ticks, and the measuring of the event loop's lag."""
LONG = "x" * 2000
"""Takes several chunks to prefill; scored, it makes an answer larger than all buffers on its way."""
SCORED = {"prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 0}


def close(writer):
    writer.close()


def half_close(writer):
    """End one's own side only, and go some time later: some clients do that to say that they have asked everything."""
    writer.write_eof()
    asyncio.get_running_loop().call_later(0.01, writer.close)


LEAVING = (close, reset, half_close)
ENDLESS = {"prompt": "Once", "ignore_eos": True}
HTTP_CALLS = [
    {**call, "stream": stream}
    for stream in (False, True)
    for call in (ENDLESS, {**ENDLESS, "n": 2}, {"prompt": LONG}, SCORED)
    if not (stream and call is SCORED)  # which there is not
]
JSONL_CALLS = [ENDLESS, {**ENDLESS, "n": 2}, {"prompt": LONG}]


async def call_http(server, body):
    reader, writer = await _connected(server.port)
    writer.write(http_post("/v1/completions", json.dumps(body).encode()))
    return reader, writer


async def call_jsonl(server, body):
    reader, writer = await _connected(server.jsonl_port)
    for number in range(2):
        writer.write(json.dumps({"op": "generate", "id": number, **body}).encode() + b"\n")
    return reader, writer


async def _connected(port):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=sock, limit=SMALL_BUFFER)


WAYS = [
    *itertools.product([call_http], HTTP_CALLS, LEAVING, [True, False]),
    *itertools.product([call_jsonl], JSONL_CALLS, LEAVING, [True, False]),
]


async def break_one(server, connections, way, seen, chance):
    """Call, perhaps read, and leave at some moment; count where the server was with it."""
    call, body, leave, reads = way
    reader, writer = await call(server, body)
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(chance.random() * 0.05):
            while reads and await reader.read(100):
                pass
            await asyncio.Event().wait()
    if "echo" in body and not reads:
        await until(lambda: any(map(unread, connections)))
        seen["unread"] += 1
    engine = server._serving.get().engine
    seen.update(view.state for view in engine.slots())
    seen["waiting"] += engine.num_waiting
    with contextlib.suppress(OSError):
        leave(writer)
        await writer.wait_closed()


def unread(connection):
    """Bytes of answers that are on their way and not taken."""
    return connection.transport is not None and connection.transport.get_write_buffer_size()


@pytest.fixture
def connections(monkeypatch):
    """Those HTTP has at the moment."""
    there = set()
    made, lost = _Connection.connection_made, _Connection.connection_lost

    def connection_made(self, transport):
        there.add(self)
        made(self, transport)

    def connection_lost(self, exc):
        there.discard(self)
        lost(self, exc)

    monkeypatch.setattr(_Connection, "connection_made", connection_made)
    monkeypatch.setattr(_Connection, "connection_lost", connection_lost)
    return there


@pytest.fixture
async def server():
    load = _load(FakeBackend(delay_s=0.0005), n_slots=SLOTS, max_len=2**12)
    async with Server(_settings(jsonl_port=0, prefill_chunk=2**8, max_queue=1000)) as server:
        await server.start(load)
        for listening in (*server._http, *server._jsonl):
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        yield server


async def what_is_there(server, connections):
    """Everything a connection could leave behind, once all has come to rest for a while."""
    engine = server._serving.get().engine
    for _ in range(20):
        await until(lambda: not engine._sinks and not connections and len(asyncio.all_tasks()) <= OWN_TASKS)
        await asyncio.sleep(0.02)
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "files": psutil.Process().num_fds(),
        "threads": psutil.Process().num_threads(),
        "slots": [view.state for view in engine.slots()],
    }, len(gc.get_objects())


async def test_31_a_thousand_broken_connections_leave_nothing(server, connections):
    chance = random.Random(0)
    seen = Counter()

    async def break_all(rounds):
        for _ in range(rounds):
            ways = chance.sample(WAYS, len(WAYS))
            while ways:
                few, ways = ways[:AT_ONCE], ways[AT_ONCE:]
                await asyncio.gather(*(break_one(server, connections, way, seen, chance) for way in few))

    await break_all(1)
    before, objects_before = await what_is_there(server, connections)
    await break_all(ROUNDS)
    after, objects_after = await what_is_there(server, connections)
    num_broken = ROUNDS * len(WAYS)
    assert num_broken >= 1000
    assert after == before
    assert objects_after - objects_before < num_broken / 2, "something is kept of every connection"
    assert all(seen[what] for what in ("waiting", "prefilling", "decoding", "unread")), seen
