import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from clients.errors import ServerError, UnreachableError
from clients.jsonl import JsonlClient


class Socket:
    """Records every operation; answers `generate` only when told to, in whatever order."""

    def __init__(self) -> None:
        self.operations: asyncio.Queue[dict] = asyncio.Queue()
        self.connected = asyncio.Event()
        self.writer: asyncio.StreamWriter

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.connected.set()
        async for line in reader:
            self.operations.put_nowait(json.loads(line))
        writer.close()

    def send(self, **event: object) -> None:
        self.writer.write(json.dumps(event).encode() + b"\n")


@pytest.fixture
async def socket(tmp_path) -> AsyncIterator[Socket]:
    socket = Socket()
    socket.path = tmp_path / "socket"
    server = await asyncio.start_unix_server(socket, socket.path)
    yield socket
    server.close()


async def test_answers_that_interleave_reach_the_request_they_belong_to(socket):
    async def text_of(prompt: str) -> str:
        return "".join([e["text"] async for e in client.generate(prompt=prompt) if e["event"] == "text"])

    async with JsonlClient(socket.path) as client:
        first = asyncio.create_task(text_of("one"))
        second = asyncio.create_task(text_of("two"))
        asked = [await socket.operations.get() for _ in range(2)]
        assert [operation["op"] for operation in asked] == ["generate", "generate"]
        ids = {operation["prompt"]: operation["id"] for operation in asked}
        for piece in "ab":
            for prompt, client_id in ids.items():
                socket.send(event="text", id=client_id, text=prompt + piece)
        socket.send(event="finished", id=ids["two"], finish_reason="length")
        socket.send(event="finished", id=ids["one"], finish_reason="length")
        assert (await first, await second) == ("oneaoneb", "twoatwob")


async def test_closing_a_request_cancels_it_and_leaves_the_connection_usable(socket):
    async with JsonlClient(socket.path) as client:
        async with contextlib.aclosing(client.generate(prompt="x")) as events:
            waiting = asyncio.ensure_future(anext(events))
            first = await socket.operations.get()
            socket.send(event="started", id=first["id"])
            assert (await waiting)["event"] == "started"
        assert await socket.operations.get() == {"op": "cancel", "id": first["id"]}
        socket.send(event="finished", id=first["id"], finish_reason="abort")

        later = asyncio.create_task(anext(client.generate(prompt="y")))
        second = await socket.operations.get()
        assert second["id"] != first["id"]
        socket.send(event="started", id=second["id"])
        assert (await later)["id"] == second["id"]


async def test_a_finished_request_is_not_cancelled(socket):
    async with JsonlClient(socket.path) as client:
        whole = asyncio.create_task(anext(client.generate(prompt="x")))
        operation = await socket.operations.get()
        socket.send(event="finished", id=operation["id"], finish_reason="stop")
        assert (await whole)["finish_reason"] == "stop"
    assert socket.operations.empty()


async def test_an_error_event_is_raised(socket):
    async with JsonlClient(socket.path) as client:
        answer = asyncio.create_task(anext(client.generate(prompt="")))
        operation = await socket.operations.get()
        error = {"message": "prompt is empty", "type": "invalid_request_error", "param": "prompt", "code": None}
        socket.send(event="error", id=operation["id"], error=error)
        with pytest.raises(ServerError, match="prompt is empty") as refused:
            await answer
    assert refused.value.param == "prompt"


async def test_the_key_is_the_first_line(socket):
    async with JsonlClient(socket.path, api_key="secret"):
        assert await socket.operations.get() == {"op": "auth", "key": "secret"}


async def test_a_server_that_hangs_up_ends_every_request_with_its_reason(socket):
    async with JsonlClient(socket.path) as client:
        answers = [asyncio.create_task(anext(client.generate(prompt="x"))) for _ in range(2)]
        for _ in answers:
            await socket.operations.get()
        socket.send(event="error", id=None, error={"message": "the API key is not valid"})
        socket.writer.close()
        for answer in answers:
            with pytest.raises(UnreachableError, match="the API key is not valid"):
                await answer
        with pytest.raises(UnreachableError, match="the API key is not valid"):
            await anext(client.generate(prompt="x"))


async def test_no_socket_there_is_said_with_its_address(tmp_path):
    with pytest.raises(UnreachableError, match=r"no JSON socket at .*nobody"):
        await JsonlClient(tmp_path / "nobody").__aenter__()
