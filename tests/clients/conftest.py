"""A small OpenAI-compatible server made of canned answers, so that clients are tested against what they may meet."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class CannedServer:
    """Streams `pieces`; with `hold` set, it waits after the first one until the client has gone."""

    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo", "!"])
    hold: bool = False
    truncate: bool = False
    stream_error: bool = False
    refuse_from: int | None = None
    most_messages: int | None = None
    finish_reason: str = "stop"

    url: str = ""
    close: Callable[[], Awaitable[None]] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/v1/completions", self.generate)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "loading"}, status=503)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "canned"}, {"id": "other"}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.refuse_from is not None and len(self.bodies) > self.refuse_from:
            error = {"message": "n must be >= 1, got 0", "type": "invalid_request_error", "param": "n", "code": "bad"}
            return web.json_response({"error": error}, status=400)
        if self.most_messages is not None and len(body["messages"]) > self.most_messages:
            error = {"message": "the prompt is too long", "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "".join(self.pieces)}]})
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self.stream(request, chat=request.path.endswith("/chat/completions"))
        finally:
            self.num_running -= 1
            self.ended.set()

    async def stream(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": ping\n\n")
        for piece in self.pieces:
            choice = {"index": 0, "delta": {"content": piece}} if chat else {"index": 0, "text": piece}
            await self.send(response, {"choices": [choice]})
            if self.hold:
                await asyncio.Event().wait()  # the test server cancels the handler of a client that is gone
        if self.stream_error:
            await self.send(response, {"error": {"message": "it broke", "code": 500}})
        elif not self.truncate:
            if chat:
                await self.send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
            usage = {"prompt_tokens": 5, "completion_tokens": len(self.pieces)}
            await self.send(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        return response

    async def send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await asyncio.sleep(0.001)


@pytest.fixture
async def canned() -> AsyncIterator[CannedServer]:
    server = CannedServer()
    async with TestServer(server.app()) as running:
        server.url = str(running.make_url("")).rstrip("/")
        server.close = running.close
        yield server
