"""Limits, tried over raw sockets: each says which it is, and a client that keeps to none holds nothing for long."""

import asyncio
import contextlib
import json

import pytest

from engine.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from scheduler.serve.http import protocol
from scheduler.serve.wire.prompt import MAX_PROMPTS
from scheduler.serve.wire.sampling import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, MAX_CHOICES
from tests.scheduler.serve.rig import HANG_GUARD_S, http_post, reply_of, until

COMPLETIONS = "/v1/completions"
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.asynccontextmanager
async def connection(server):
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        async with asyncio.timeout(HANG_GUARD_S):
            yield reader, writer
    finally:
        writer.transport.abort()


async def answer(reader):
    """One response of a connection that stays open."""
    head = await reader.readuntil(b"\r\n\r\n")
    return reply_of(head + await reader.readexactly(int(reply_of(head).headers["content-length"])))


@pytest.mark.parametrize("begun", [b"G", b"GET /health HTTP/1.1\r\n", GET_HEALTH[:-2]])
async def test_a_head_that_does_not_arrive_is_not_waited_for(serve, begun):
    server = await serve(body_timeout=0.1)
    async with connection(server) as (reader, writer):
        writer.write(begun)
        assert reply_of(await reader.read()).refused(408)["code"] == "head_timeout"
    await until(lambda: server.connections == 0)


async def test_a_head_that_comes_byte_by_byte_gets_no_more_time(serve):
    server = await serve(body_timeout=0.2)

    async def drip(writer):
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"X: y\r\n")
                await asyncio.sleep(0.01)

    async with connection(server) as (reader, writer):
        writer.write(GET_HEALTH[:-2])
        dripping = asyncio.create_task(drip(writer))
        with contextlib.suppress(ConnectionResetError):  # the answer may be lost to what is still being sent
            assert b"408" in await reader.read()
        dripping.cancel()
    await until(lambda: server.connections == 0)


async def test_the_time_for_a_head_begins_anew_with_each_request(serve):
    server = await serve(body_timeout=0.2)
    async with connection(server) as (reader, writer):
        for _ in range(4):
            writer.write(GET_HEALTH[:10])
            await asyncio.sleep(0.08)
            writer.write(GET_HEALTH[10:])
            assert (await answer(reader)).status == 200
        writer.write(GET_HEALTH[:10])
        assert reply_of(await reader.read()).refused(408)["code"] == "head_timeout"


async def test_a_long_answer_is_no_late_head(serve):
    server = await serve(body_timeout=0.05)
    async with connection(server) as (reader, writer):
        writer.write(http_post(COMPLETIONS, b'{"prompt":"Hi","max_tokens":1}'))
        assert (await answer(reader)).status == 200
        await asyncio.sleep(0.15)
        writer.write(GET_HEALTH)
        assert (await answer(reader)).status == 200


@pytest.mark.parametrize("requests", [0, 1])
async def test_a_silent_connection_is_closed(serve, monkeypatch, requests):
    monkeypatch.setattr(protocol, "IDLE_TIMEOUT_S", 0.05)
    server = await serve()
    async with connection(server) as (reader, writer):
        writer.write(GET_HEALTH * requests)
        assert (await reader.read()).count(b"200 OK") == requests


@pytest.mark.slow
async def test_an_answer_left_unread_does_not_keep_a_closed_connection(serve, monkeypatch):
    monkeypatch.setattr(protocol, "IDLE_TIMEOUT_S", 0.1)
    server = await serve(write_timeout=0.2)
    async with connection(server) as (_, writer):
        writer.transport.pause_reading()
        await until(lambda: server.connections == 1)
        (theirs,) = server.runner.server.connections
        transport = theirs.transport
        # More than the kernel takes, less than makes our own side wait: it is closed with the rest still to be sent.
        while not transport.get_write_buffer_size():
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
            await asyncio.sleep(0.005)
        await until(transport.is_closing)
        await until(lambda: server.connections == 0)


async def test_a_body_that_comes_byte_by_byte_gets_no_more_time(serve, monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    server = await serve(body_timeout=0.2)
    async with connection(server) as (reader, writer):
        writer.write(http_post(COMPLETIONS, b"").replace(b"Length: 0", b"Length: 1000"))
        reading = asyncio.create_task(answer(reader))
        while not writer.transport.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        assert (await reading).refused(408)["code"] == "body_timeout"
    await until(lambda: server.connections == 0)


@pytest.mark.parametrize("headers", ["X: " + "y" * 9000, "\r\n".join(f"X-{i}: y" for i in range(200))])
async def test_a_large_head_is_refused_wherever_it_comes(server, headers):
    async with connection(server) as (reader, writer):
        writer.write(GET_HEALTH)
        assert (await answer(reader)).status == 200
        writer.write(GET_HEALTH[:-2] + headers.encode() + b"\r\n\r\n")
        assert reply_of(await reader.read()).refused(431)["code"] == "header_too_large"


async def test_a_connection_too_many_is_refused_until_one_ends(serve):
    server = await serve(max_connections=2)
    async with connection(server) as first, connection(server):
        await until(lambda: server.connections == 2)
        async with connection(server) as (reader, _):
            assert reply_of(await reader.read()).refused(503)["code"] == "unavailable"
        first[1].close()
        await until(lambda: server.connections == 1)
        async with connection(server) as (reader, writer):
            writer.write(GET_HEALTH)
            assert (await answer(reader)).status == 200


@pytest.mark.parametrize(
    ("field", "most", "too_much"),
    [
        ("n", MAX_CHOICES, MAX_CHOICES + 1),
        ("stop", [str(i) for i in range(MAX_STOP_STRINGS)], [str(i) for i in range(MAX_STOP_STRINGS + 1)]),
        ("stop", "x" * MAX_STOP_LENGTH, "x" * (MAX_STOP_LENGTH + 1)),
        ("stop", "x" * MAX_STOP_LENGTH, ["y", "x" * (MAX_STOP_LENGTH + 1)]),
        ("stop_token_ids", [7] * MAX_STOP_TOKENS, [7] * (MAX_STOP_TOKENS + 1)),
        ("logit_bias", {"1": 1, "2": 2}, {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}),
        ("allowed_token_ids", [7] * 258, [7] * 259),
        ("bad_words", ["x"] * MAX_BAD_WORDS, ["x"] * (MAX_BAD_WORDS + 1)),
        ("bad_words", ["x" * MAX_BAD_WORD_LENGTH], ["x" * (MAX_BAD_WORD_LENGTH + 1)]),
        ("bad_words", ["x"], [str(i) + "x" * 1000 for i in range(1 + MAX_BAD_WORD_TOKENS // 2000)]),
        ("prompt", ["x"] * 8, ["x"] * (MAX_PROMPTS + 1)),
        ("prompt", [[7]] * 8, [[7]] * (MAX_PROMPTS + 1)),
    ],
)
async def test_what_one_call_may_ask_for_is_bounded(serve, field, most, too_much):
    server = await serve()
    body = {"prompt": "Hi", "max_tokens": 1}
    (await server.post(COMPLETIONS, {**body, field: too_much})).refused(400, field)
    assert (await server.post(COMPLETIONS, {**body, field: most})).status == 200


async def test_a_body_of_nothing_but_depth_or_length_is_refused_soon(serve):
    server = await serve(max_body=2**20)
    many = b'{"prompt":"Hi","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(90_000)) + b"}}"
    for body in (b"[" * 2**20, b'{"a":' * 200_000, b'{"prompt":' + b"[0," * 300_000, many):
        raw = await server.raw(http_post(COMPLETIONS, body, "Connection: close"))
        reply_of(raw).refused(400)
    raw = await server.raw(http_post(COMPLETIONS, json.dumps({"prompt": "x" * 2**21}).encode(), "Connection: close"))
    reply_of(raw).refused(413)
