"""A server over HTTP without a model: the fakes behind the real application, on a free port of this event loop."""

import asyncio
import contextlib
import io
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from engine.errors import TemplateError
from scheduler.events import Finished
from scheduler.loop import EngineLoop
from scheduler.serve.http.app_keys import Serving
from scheduler.serve.http.protocol import ConnectionLimits, Runner
from scheduler.serve.http.routes import build_app
from scheduler.serve.keys import ApiKeys
from scheduler.serve.service import ServedModel, Service
from scheduler.serve.settings import ServeSettings
from tests.fakes import ByteTokenizer, FakeBackend, fake_loop
from tests.live_server import Reply, Stream, parse_sse

MAX_LEN = 256
MODEL = "fake"
HANG_GUARD_S = 60


@dataclass(frozen=True)
class FakeRendered:
    pieces: tuple[tuple[str, bool], ...]

    @property
    def text(self):
        return "".join(text for text, _ in self.pieces)

    def encode(self, tokenizer):
        return [i for text, special in self.pieces for i in tokenizer.encode(text, parse_special=special)]


class FakeTemplate:
    """ChatML without a default system message; adds strings as templates do, refuses one word, may write the time."""

    source = "{{ messages }}"

    def render(self, messages, /, *, add_generation_prompt=True, continue_final_message=False, now, **template_kwargs):
        assert now() is not None
        pieces = []
        for message in messages:
            if message["content"] == "refuse me":
                raise TemplateError("the template refuses these messages")
            pieces += [("<|im_start|>", True), (message["role"] + "\n" + message["content"], False)]
            pieces += [("<|im_end|>", True), ("\n", False)]
        if continue_final_message:
            del pieces[-2:]
        if add_generation_prompt:
            pieces += [("<|im_start|>", True), ("assistant\n", False)]
        if "clock" in template_kwargs:
            pieces.append((now().strftime(template_kwargs["clock"]), False))
        if "note" in template_kwargs:
            pieces.append((template_kwargs["note"], False))
        return FakeRendered(tuple(pieces))


@dataclass
class Rig:
    engine: EngineLoop
    service: Service
    serving: Serving
    runner: Runner
    session: aiohttp.ClientSession

    host = "127.0.0.1"

    @property
    def port(self) -> int:
        return self.runner.addresses[0][1]

    @property
    def connections(self) -> int:
        return len(self.runner.server.connections)

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> Reply:
        url = f"http://{self.host}:{self.port}{path}"
        skip = ["Content-Type"] if "Content-Type" not in headers else []
        async with self.session.request(
            method, url, data=body and io.BytesIO(body), headers=headers, skip_auto_headers=skip
        ) as response:
            return Reply(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.request("GET", path, headers=headers)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, raw, {"Content-Type": "application/json", **headers})

    async def chat(self, content: str | Sequence[dict[str, Any]] = "Hi", **fields: Any) -> Reply:
        return await self.post("/v1/chat/completions", chat_body(content, **fields))

    async def complete(self, prompt: Any = "Hello", **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def stream_chat(self, content: str | Sequence[dict[str, Any]] = "Hi", **fields: Any) -> Stream:
        return streamed(await self.chat(content, stream=True, **fields))

    async def stream_completion(self, prompt: Any = "Hello", **fields: Any) -> Stream:
        return streamed(await self.complete(prompt, stream=True, **fields))

    async def raw(self, data: bytes) -> bytes:
        """Everything the server sends back for `data` until it closes the connection."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), HANG_GUARD_S)
        finally:
            writer.close()

    async def first_reply(self, data: bytes) -> Reply:
        """The first response to `data`; whether the connection is closed after it is not waited for."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(HANG_GUARD_S):
                reply = reply_of(await reader.readuntil(b"\r\n\r\n"))
                body = await reader.readexactly(int(reply.headers["content-length"]))
            return Reply(reply.status, reply.headers, body)
        finally:
            writer.close()

    async def open(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a call has been sent and nothing read yet."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(http_post(path, json.dumps(body).encode()))
        await writer.drain()
        return reader, writer

    async def idle(self) -> None:
        """Return once nothing runs and nothing waits."""
        await until(lambda: self.engine.num_running == self.engine.num_waiting == 0)


def chat_body(content: str | Sequence[dict[str, Any]] = "Hi", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {"messages": messages, **fields}


def http_post(path: str, body: bytes, *headers: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"POST {path} HTTP/1.1", "Host: localhost", *headers))
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def streamed(reply: Reply, *, has_done: bool = True) -> Stream:
    assert reply.status == 200, (reply.status, reply.body)
    assert reply.headers["content-type"].split(";")[0] == "text/event-stream"
    return parse_sse(reply.body, has_done=has_done)


def reply_of(raw: bytes) -> Reply:
    """The last response in `raw`."""
    head, _, body = raw[raw.rindex(b"HTTP/1.") :].partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Reply(int(status_line.split(" ")[1]), headers, body)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a client that crashed."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def until(condition: Callable[[], bool]) -> None:
    """Return once `condition()` holds."""
    async with asyncio.timeout(HANG_GUARD_S):
        while not condition():  # noqa: ASYNC110 - nothing announces what tests wait for
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def serve(
    backend: FakeBackend | None = None,
    *,
    template: FakeTemplate | None = FakeTemplate(),  # noqa: B008 - it has no state
    loading: bool = False,
    n_slots: int = 4,
    max_queue: int = 16,
    max_len: int = MAX_LEN,
    on_finished: Callable[[Finished], None] = lambda _finished: None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A running server; `settings` are fields of `ServeSettings`."""
    engine = fake_loop(backend, n_slots=n_slots, max_len=max_len, max_queue=max_queue, on_finished=on_finished)
    given = ServeSettings(model=Path(f"{MODEL}.gguf"), **settings)
    model = ServedModel(
        names=given.model_names,
        accepts_any_name=given.accepts_any_model_name,
        max_len=max_len,
        fingerprint="fp_fake",
        created=1,
    )
    service = Service(engine, ByteTokenizer(), template, model)
    serving = Serving(None if loading else service)
    app = build_app(serving, given, ApiKeys(given.api_key, given.api_key_file))
    runner = Runner(app, ConnectionLimits.of(given), shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, Rig.host, 0)
    await site.start()
    ticking = asyncio.create_task(engine.run())
    async with aiohttp.ClientSession() as session:
        yield Rig(engine, service, serving, runner, session)
    await engine.stop()
    await ticking
    await runner.cleanup()
    service.close()


Serve = Callable[..., Awaitable[Rig]]
