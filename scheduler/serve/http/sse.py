"""Server-sent events over one response: several payloads a write, comments while nothing happens, patience with limits.

The format is the HTML standard's event stream: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from aiohttp import web

from scheduler.serve.http.body import deliver
from scheduler.serve.wire.encode import encode_json

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events before it passes them on
}
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
SMALL_WRITE = 16 * 1024
"""Bytes: asyncio lets a writer wait when more than four times as many are left in a connection's buffer."""


class EventWriter:
    """The open stream to one client; as a context manager it pings the client until it is left.

    `ping_s` seconds of silence make a comment, 0 never; a write that is not taken within `write_timeout_s` cuts the
    connection.
    """

    def __init__(self, request: web.Request, *, ping_s: float, write_timeout_s: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=HEADERS)
        self._ping_s = ping_s
        self._write_timeout_s = write_timeout_s
        self._t_written = 0.0
        self._pinger: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Send the headers at once: clients and proxies time out on them, however long the queue is."""
        writer = await self._response.prepare(self._request)
        assert writer is not None
        writer.send_headers()
        if self._ping_s:
            self._pinger = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pinger is not None:
            self._pinger.cancel()

    async def send(self, *payloads: object, done: bool = False) -> None:
        """One event a payload, all in one write, `[DONE]` behind the last if `done`. Raises `ConnectionError`."""
        events = [b"data: " + encode_json(payload) + b"\n\n" for payload in payloads]
        if done:
            events.append(DONE)
        if events:
            await self._write(b"".join(events))

    async def end(self) -> web.StreamResponse:
        """The response, complete."""
        await deliver(self._request, self._response.write_eof(), self._write_timeout_s)
        return self._response

    async def _write(self, data: bytes) -> None:
        self._t_written = asyncio.get_running_loop().time()
        if self._will_not_wait(len(data)):  # a time limit would cost half as much again as the write itself
            await self._response.write(data)
        else:
            await deliver(self._request, self._response.write(data), self._write_timeout_s)

    def _will_not_wait(self, n_bytes: int) -> bool:
        """Whether the client has taken all so far, so that a write of so many bytes is done at once."""
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() == 0 and n_bytes < SMALL_WRITE

    async def _ping(self) -> None:
        """Write a comment whenever nothing else has been written for `ping_s`."""
        loop = asyncio.get_running_loop()
        self._t_written = loop.time()
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._t_written + self._ping_s - loop.time())
                if loop.time() >= self._t_written + self._ping_s:
                    await self._write(PING)
