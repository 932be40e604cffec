"""Our client of the JSON socket against the real model."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from clients.errors import ServerError
from clients.jsonl import JsonlClient
from tests.live_server import LiveServer

GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(params=["tcp", "unix"])
def connection(request, server: LiveServer) -> JsonlClient:
    if request.param == "tcp":
        return JsonlClient(server.host, server.ready["jsonl_port"])
    return JsonlClient(Path(server.ready["unix_socket"]))


async def text_of(client: JsonlClient, **fields: object) -> str:
    return "".join([event["text"] async for event in client.generate(**fields) if event["event"] == "text"])


async def test_the_text_is_that_of_the_http_api(connection, server):
    completion = await asyncio.to_thread(server.complete, "Hello", **GREEDY)
    chat = await asyncio.to_thread(server.chat, "Hi", **GREEDY)
    async with connection as client:
        assert await text_of(client, prompt="Hello", **GREEDY) == completion.json["choices"][0]["text"]
        messages = [{"role": "user", "content": "Hi"}]
        assert await text_of(client, messages=messages, **GREEDY) == chat.json["choices"][0]["message"]["content"]


async def test_many_requests_share_one_connection(connection):
    prompts = [f"The number {number} is" for number in range(6)]
    async with connection as client:
        alone = [await text_of(client, prompt=prompt, **GREEDY) for prompt in prompts]
        together = await asyncio.gather(*[text_of(client, prompt=prompt, **GREEDY) for prompt in prompts])
    assert together == alone


async def test_a_request_that_is_closed_frees_its_slot(connection, server):
    async with connection as client:
        async with contextlib.aclosing(client.generate(prompt="Once", max_tokens=2000, ignore_eos=True)) as events:
            async for event in events:
                if event["event"] == "text":
                    break
        await asyncio.to_thread(server.wait_until_idle)
        assert await text_of(client, prompt="Hello", **GREEDY)


async def test_a_refusal_names_the_field(connection):
    async with connection as client:
        with pytest.raises(ServerError, match="temperature") as refused:
            await anext(client.generate(prompt="Hi", temperature=-1))
    assert refused.value.param == "temperature"
