import asyncio
import contextlib
import socket
import ssl

import pytest

from clients.api import LockstepClient
from clients.errors import ClientError, ServerError, UnreachableError
from tests.scheduler.serve.test_tls import make_certificate

HI = [{"role": "user", "content": "Hi"}]


def text_of(chunks: list[dict]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def test_a_plain_answer_is_the_servers_json(canned):
    async with LockstepClient(canned.url) as client:
        answer = await client.complete("Hi", max_tokens=3)
    assert answer["choices"][0]["text"] == "Hello!"
    assert canned.bodies == [{"prompt": "Hi", "max_tokens": 3}]


async def test_a_stream_yields_every_chunk_up_to_done(canned):
    async with LockstepClient(canned.url) as client:
        chunks = [chunk async for chunk in client.stream_chat(HI, temperature=0)]
    assert text_of(chunks) == "Hello!"
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert canned.bodies == [{"messages": HI, "temperature": 0, "stream": True}]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_base_url_may_end_with_v1_or_not(canned, suffix):
    async with LockstepClient(canned.url + suffix) as client:
        assert await client.models() == ["canned", "other"]
        assert await client.default_model() == "canned"


async def test_a_base_url_without_a_scheme_is_http(canned):
    async with LockstepClient(canned.url.removeprefix("http://")) as client:
        assert await client.models() == ["canned", "other"]


async def test_the_key_goes_along(canned):
    async with LockstepClient(canned.url, "secret") as client:
        await client.complete("Hi")
    assert canned.headers[0]["Authorization"] == "Bearer secret"


async def test_a_loading_server_is_not_ready(canned):
    async with LockstepClient(canned.url) as client:
        assert await client.health() is False


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_carries_the_envelopes_fields(canned, stream):
    canned.refuse_from = 0
    async with LockstepClient(canned.url) as client:
        answer = anext(client.stream_chat(HI, n=0)) if stream else client.chat(HI, n=0)
        with pytest.raises(ServerError, match="n must be >= 1") as refused:
            await answer
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "n", "bad")


async def test_a_refusal_in_no_envelope_is_a_server_error_too(canned):
    async with LockstepClient(canned.url + "/nowhere") as client:
        with pytest.raises(ServerError, match="404: Not Found") as refused:
            await client.models()
    assert refused.value.status == 404


async def test_an_error_within_a_stream_is_raised_after_what_came_before(canned):
    canned.stream_error = True
    async with LockstepClient(canned.url) as client:
        stream = client.stream_chat(HI)
        assert text_of([await anext(stream) for _ in range(3)]) == "Hello!"
        with pytest.raises(ServerError, match="it broke"):
            await anext(stream)


async def test_a_stream_that_ends_without_done_is_not_taken_for_whole(canned):
    canned.truncate = True
    async with LockstepClient(canned.url) as client:
        with pytest.raises(UnreachableError, match="DONE"):
            [chunk async for chunk in client.stream_chat(HI)]


async def test_closing_a_stream_hangs_up(canned):
    canned.hold = True
    async with LockstepClient(canned.url) as client:
        async with contextlib.aclosing(client.stream_chat(HI)) as chunks:
            assert text_of([await anext(chunks)]) == "Hel"
        await canned.ended.wait()


async def test_cancelling_the_reader_hangs_up(canned):
    canned.hold = True

    async def read(client: LockstepClient) -> None:
        async with contextlib.aclosing(client.stream_chat(HI)) as chunks:
            async for _ in chunks:
                reading.set()

    reading = asyncio.Event()
    async with LockstepClient(canned.url) as client:
        task = asyncio.create_task(read(client))
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await canned.ended.wait()


async def test_connections_the_server_has_closed_meanwhile_cost_no_answer():
    """However many were kept: the second asking takes a new one, not the next of those that are closed as well."""
    num_connections = 0
    all_asked = asyncio.Barrier(2)

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if num_connections <= 2:
            await all_asked.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with LockstepClient(f"http://127.0.0.1:{port}") as client:
            assert await asyncio.gather(client.complete("a"), client.complete("b")) == [{}, {}]
            assert await client.complete("c") == {}
    assert num_connections == 3


async def test_nobody_at_the_address_says_how_to_start_a_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with LockstepClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(UnreachableError, match=rf"no server at http://127.0.0.1:{port} .*lockstep serve.*--url"):
            await client.models()


async def test_a_certificate_nobody_trusts_is_not_taken_for_a_missing_server(tmp_path):
    chain, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain, key)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        async with LockstepClient(url) as client:
            with pytest.raises(UnreachableError, match=rf"certificate of {url} is refused: self.signed.*SSL_CERT_FILE"):
                await client.models()


async def test_a_server_without_tls_is_not_taken_for_a_missing_one(canned):
    url = canned.url.replace("http:", "https:")
    async with LockstepClient(url) as client:
        with pytest.raises(UnreachableError, match=f"{url} speaks no TLS"):
            await client.models()


@pytest.mark.parametrize("url", ["http://", "ftp://127.0.0.1", "http://127.0.0.1:port"])
async def test_an_address_that_is_none_is_refused_as_such(url):
    async with LockstepClient(url) as client:
        with pytest.raises(ClientError, match="is not the URL of a server"):
            await client.models()
