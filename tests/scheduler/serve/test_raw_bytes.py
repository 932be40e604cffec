"""Bytes that are no HTTP get an envelope too, never a traceback, and never a hang."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes import FakeBackend
from tests.scheduler.serve import rig
from tests.scheduler.serve.rig import http_post, reply_of

HEAD = b"Host: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9.9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nno colon here\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: ten\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nnot a size\r\n",
        b"GET /\r\n\r\n",
        b"GET /health HTTP/0.9\r\n\r\n",
        b"GET /health HTTP/2.0\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: \x00\r\n\r\n",
    ],
)
async def test_what_is_no_http_request_is_refused_in_the_envelope(server, data):
    reply_of(await server.raw(data)).refused(400)
    assert (await server.get("/health")).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(5000)) + b"\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_refused_in_the_envelope(server, data):
    assert reply_of(await server.raw(data)).refused(431)["code"] == "header_too_large"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/nope"])
@pytest.mark.parametrize("broken", [b"zz\r\n", b"2\r\nabcd\r\n", b"-1\r\n", b"0\r\nno colon here\r\n\r\n"])
async def test_a_body_that_breaks_in_a_later_packet_is_refused_at_once(serve, path, broken, caplog):
    server = await serve(body_timeout=10 * rig.HANG_GUARD_S)
    reader, writer = await asyncio.open_connection(server.host, server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    writer.write(head + b'5\r\n{"pro\r\n')
    if path == "/nope":
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
    else:
        await rig.until(lambda: server.connections == 1)
        await asyncio.sleep(0.02)
    writer.write(broken)
    async with asyncio.timeout(rig.HANG_GUARD_S):
        raw = await reader.read()
    writer.close()
    if path != "/nope":
        assert "transfer encoding" in reply_of(raw).refused(400)["message"]
        assert raw.count(b"HTTP/1.1") == 1
    assert (await server.get("/health")).status == 200
    assert "Unhandled exception" not in caplog.text


async def test_a_body_that_breaks_behind_a_whole_request_takes_nothing_from_it(serve):
    server = await serve(FakeBackend(delay_s=0.01), body_timeout=10 * rig.HANG_GUARD_S)
    reader, writer = await asyncio.open_connection(server.host, server.port)
    chunked = http_post("/v1/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    writer.write(http_post("/v1/completions", b'{"prompt":"Hi","max_tokens":9}') + chunked + b'5\r\n{"pro\r\n')
    await rig.until(lambda: server.engine.num_running == 1)
    writer.write(b"zz\r\n")
    async with asyncio.timeout(rig.HANG_GUARD_S):
        raw = await reader.read()
    writer.close()
    assert raw.startswith(b"HTTP/1.1 200 OK")
    assert b'"finish_reason":"length"' in raw
    reply_of(raw).refused(400)


async def test_an_old_http_client_gets_its_answer_and_its_stream(server):
    for fields in (b'"stream":false', b'"stream":true'):
        body = b'{"prompt":"Hi","max_tokens":2,' + fields + b"}"
        raw = await server.raw(http_post("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b" 200 OK\r\n" in raw.partition(b"\r\n\r\n")[0] + b"\r\n"
        assert b"finish_reason" in raw


async def test_pipelined_requests_are_answered_in_order(server):
    first = http_post("/v1/completions", b'{"prompt":"Hi","max_tokens":2}')
    last = b"GET /version HTTP/1.1\r\n" + HEAD + b"\r\n"
    raw = await server.raw(first + first + last)
    assert raw.count(b"HTTP/1.1 200 OK") == 3
    assert b"version" in raw[raw.rindex(b"HTTP/1.1") :]


@pytest.mark.slow
@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_bytes_at_all_leave_the_server_alive(data):
    async with rig.serve() as server:
        raw = await server.raw(data + b"\r\n\r\nGET\r\n\r\n")
        assert b"Traceback" not in raw
        assert (await server.get("/health")).status == 200
