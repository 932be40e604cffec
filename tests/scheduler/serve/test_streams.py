"""Streams: refused before they begin, alive while nothing happens, honest when they break, bounded when unread."""

import asyncio
import json

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.batch import RowError
from engine.errors import CacheError
from tests.fakes import FakeBackend
from tests.live_server import parse_sse
from tests.scheduler.serve.rig import chat_body, http_post, until

CHAT = "/v1/chat/completions"


def fails_at(position, text):
    """A fault on the token at `position` of the request whose prompt is `text`."""

    def fault(work):
        request = work.sequence.request
        if bytes(request.prompt_ids) == text and len(work.sequence.output_ids) == position:
            return RowError("the sampler failed", ValueError("secret"))
        return None

    return fault


async def test_headers_come_at_once_even_if_nothing_else_does(serve):
    server = await serve(FakeBackend(delay_s=0.3))
    reader, writer = await server.open(CHAT, chat_body(stream=True, max_tokens=1))
    head = await reader.readuntil(b"\r\n\r\n")
    assert server.engine.metrics.generation_tokens == 0
    assert head.startswith(b"HTTP/1.1 200 OK")
    lines = head.lower()
    assert b"content-type: text/event-stream; charset=utf-8" in lines
    assert b"cache-control: no-cache" in lines
    assert b"x-accel-buffering: no" in lines
    assert b"aiohttp" not in lines
    writer.close()


async def test_s11_pings_are_comments_and_nothing_else(serve):
    server = await serve(FakeBackend(delay_s=0.05), sse_ping=0.01)
    stream = await server.stream_chat(max_tokens=3, temperature=0)
    assert set(stream.comments) == {": ping"}
    assert stream.text() == (await server.chat(max_tokens=3, temperature=0)).json["choices"][0]["message"]["content"]


async def test_pings_go_on_while_a_request_waits_in_the_queue(serve):
    server = await serve(FakeBackend(delay_s=0.02), n_slots=1, sse_ping=0.01)
    running = asyncio.create_task(server.chat(max_tokens=10))
    await until(lambda: server.engine.num_running == 1)
    stream = await server.stream_chat(max_tokens=1)
    assert stream.comments
    await running


async def test_without_pings_there_are_none(serve):
    server = await serve(FakeBackend(delay_s=0.02), sse_ping=0)
    assert (await server.stream_chat(max_tokens=2)).comments == []


async def test_35_a_failure_after_the_first_chunk_is_an_error_event_and_the_end(serve):
    server = await serve(FakeBackend(fault=fails_at(3, b"bad"), delay_s=0.005))
    solo = (await server.complete("good", temperature=0, max_tokens=12)).json["choices"]
    good, bad = await asyncio.gather(
        server.complete("good", temperature=0, max_tokens=12), server.complete("bad", stream=True)
    )
    assert good.json["choices"][0]["text"] == solo[0]["text"]
    stream = parse_sse(bad.body)
    *chunks, error = stream.chunks
    assert len(chunks) == 3
    assert error["error"]["message"] == "the sampler failed"
    assert error["error"]["type"] == "server_error"
    assert b"secret" not in bad.body
    assert b"ValueError" not in bad.body
    await server.idle()


async def test_35_a_failure_of_a_plain_call_is_a_500(serve):
    server = await serve(FakeBackend(fault=fails_at(3, b"bad")))
    reply = await server.complete("bad")
    reply.refused(500)
    assert b"secret" not in reply.body
    (await server.complete(["good", "bad"], n=2)).refused(500)
    await server.idle()


async def test_a_failure_of_one_prompt_ends_the_whole_stream_with_one_done(serve):
    server = await serve(FakeBackend(fault=fails_at(3, b"bad")))
    reply = await server.complete(["good", "bad"], n=2, stream=True, ignore_eos=True)
    assert "error" in parse_sse(reply.body).chunks[-1]
    await server.idle()


@pytest.mark.parametrize("fault", [ZeroDivisionError, CacheError])
async def test_a_fault_of_ours_while_streaming_is_told_without_names_and_logged(serve, monkeypatch, fault):
    def fail(*_):
        raise fault("division")

    server = await serve()
    monkeypatch.setattr("scheduler.serve.http.chat.ChatForm._delta", fail)
    with capture_logs() as logged:
        stream = parse_sse((await server.chat(stream=True)).body)
    assert stream.chunks[-1]["error"]["code"] == "internal_error"
    assert "division" not in json.dumps(stream.chunks)
    assert "stream failed" in [line["event"] for line in logged]
    await server.idle()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_s05_the_queue_is_bounded_and_says_when_to_come_back(serve, path):
    server = await serve(FakeBackend(delay_s=0.01), n_slots=1, max_queue=2)
    body = {**chat_body(), "prompt": "Hi", "ignore_eos": True}
    running = []
    for count in range(3):
        running.append(await server.open(path, body))
        await until(lambda count=count: server.engine.num_running + server.engine.num_waiting == count + 1)
    for stream in (False, True):
        reply = await server.post(path, {**body, "stream": stream})
        assert reply.refused(429)["code"] == "queue_full"
        assert int(reply.headers["retry-after"]) >= 1
    for _, writer in running:
        writer.close()
    await server.idle()
    assert (await server.post(path, {**body, "max_tokens": 1})).status == 200


@pytest.mark.slow
async def test_a_batch_that_does_not_fit_the_queue_leaves_nothing_in_it(serve):
    server = await serve(FakeBackend(delay_s=0.01), n_slots=1, max_queue=2)
    running = asyncio.create_task(server.complete(max_tokens=100, ignore_eos=True))
    await until(lambda: server.engine.num_running == 1)
    (await server.complete(["a", "b", "c"], max_tokens=1)).refused(429)
    assert (server.engine.num_running, server.engine.num_waiting) == (1, 0)
    await running


async def test_a_request_that_takes_too_long_is_ended(serve):
    server = await serve(FakeBackend(delay_s=0.01), request_timeout=0.1)
    (await server.chat()).refused(504)
    stream = parse_sse((await server.chat(stream=True)).body)
    assert stream.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert stream.chunks[-1]["error"]["code"] == "request_timeout"
    await server.idle()
    assert (await server.chat(max_tokens=1)).status == 200


async def test_a_stream_cut_short_by_the_server_says_abort(serve):
    server = await serve(FakeBackend(delay_s=0.01))
    running = asyncio.create_task(server.chat(stream=True, request_id="x"))
    await until(lambda: server.engine.metrics.generation_tokens > 2)
    server.engine.abort("chatcmpl-x")
    assert parse_sse((await running).body).finish_reasons() == ["abort"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\n", "\x0b", "\x1c"])
async def test_no_character_breaks_an_event_for_clients_that_split_lines_as_unicode_does(serve, separator):
    data = ("a" + separator + "b").encode()
    server = await serve(FakeBackend(next_token=lambda row, *_: data[len(row) - 2]))
    reply = await server.complete("xy", stream=True, max_tokens=len(data))
    lines = [line for line in reply.body.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert parse_sse(reply.body).text() == data.decode()
    plain = await server.complete("xy", max_tokens=len(data))
    assert len(plain.body.decode().splitlines()) == 1
    assert plain.json["choices"][0]["text"] == data.decode()


async def test_white_space_alone_is_sent(serve):
    server = await serve(FakeBackend(next_token=lambda *_: ord(" ")))
    assert (await server.stream_completion("x", max_tokens=3)).text() == "   "


@pytest.mark.slow
async def test_the_official_client_reads_streams_errors_and_pings(serve):
    server = await serve(FakeBackend(delay_s=0.02), sse_ping=0.01)
    url = f"http://{server.host}:{server.port}/v1"
    import openai  # a second's work, for whoever runs this test alone

    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        messages = [{"role": "user", "content": "Hi"}]
        plain = await client.chat.completions.create(model="fake", messages=messages, max_tokens=4, temperature=0)
        pieces = []
        async for chunk in await client.chat.completions.create(
            model="fake", messages=messages, max_tokens=4, temperature=0, stream=True
        ):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(pieces) == plain.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="fake", messages=messages, temperature=-1)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)


@pytest.mark.slow
async def test_a_slow_reader_holds_back_only_itself_and_is_cut_off(serve):
    blob = "x" * 4000
    server = await serve(FakeBackend(), max_len=100_000, write_timeout=0.2)
    # Every event repeats a long model name, so that unread bytes soon fill what sockets buffer.
    server.service.model = msgspec.structs.replace(server.service.model, accepts_any_name=True)
    body = {"prompt": "Hi", "stream": True, "model": blob}
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1024)
    writer.transport.pause_reading()
    writer.write(http_post("/v1/completions", json.dumps(body).encode()))
    await until(lambda: server.engine.num_running == 1)
    for _ in range(5):
        assert (await server.complete("Hi", max_tokens=4)).status == 200
    await server.idle()
    assert server.engine.metrics.generation_tokens < 99_000
    writer.transport.abort()
    del reader


@pytest.mark.slow
async def test_plain_answers_nobody_reads_are_given_up_without_a_word_in_the_log(serve, caplog):
    server = await serve(write_timeout=0.1)
    body = json.dumps({"prompt": "x" * 40_000, "return_token_strs": True}).encode()
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.transport.pause_reading()
    writer.write(http_post("/tokenize", body) * 30)  # more than half a megabyte each
    await until(lambda: server.connections == 1)
    await until(lambda: server.connections == 0)
    writer.transport.abort()
    assert not caplog.records
    assert (await server.get("/health")).status == 200


async def test_two_streams_side_by_side_get_what_each_would_get_alone(server):
    solo = [(await server.stream_completion(p, temperature=0, max_tokens=30)).text() for p in ("one", "two")]
    both = await asyncio.gather(*(server.stream_completion(p, temperature=0, max_tokens=30) for p in ("one", "two")))
    assert [stream.text() for stream in both] == solo


async def test_one_write_carries_all_that_one_tick_has_to_say(serve):
    server = await serve(FakeBackend(delay_s=0.02))
    body = {"prompt": "Hi", "stream": True, "max_tokens": 2, "n": 3, "stream_options": {"include_usage": True}}
    raw = await server.raw(http_post("/v1/completions", json.dumps(body).encode(), "Connection: close"))
    events_per_write = [
        part.count(b"data: ") for part in raw.partition(b"\r\n\r\n")[2].split(b"\r\n") if b"data" in part
    ]
    # Three choices begin and go on; then three pieces, three ends, the usage and [DONE].
    assert events_per_write[-1] >= 5
    assert len(events_per_write) <= 4


async def test_an_error_comes_behind_what_was_said_before_it_in_the_same_burst(serve, monkeypatch):
    server = await serve(FakeBackend(fault=fails_at(3, b"bad")))
    monkeypatch.setattr("scheduler.serve.http.sse.EventWriter.__aenter__", slowly_entered)
    stream = parse_sse((await server.complete("bad", stream=True)).body)
    assert "error" in stream.chunks[-1]
    assert "".join(c["choices"][0]["text"] for c in stream.chunks[:-1])


async def slowly_entered(writer):
    """Let the whole request run before the first event is taken: all of it is one burst."""
    await writer._response.prepare(writer._request)
    await asyncio.sleep(0.1)
    return writer
