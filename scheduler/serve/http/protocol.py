"""The connection, where aiohttp would answer for itself: refusals of bytes that are no HTTP wear our envelope too.

A client that goes away cancels its handler; a client too many is told so.
"""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo
from aiohttp.web_request import BaseRequest

from scheduler.serve.logs import log_refused
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.encode import encode_json
from scheduler.serve.wire.errors import ApiError, internal_error, invalid, unavailable

IDLE_TIMEOUT_S = 75.0
"""Seconds a connection may stay open between requests, and before the first one."""
LINGER_S = 10.0
"""Seconds the rest of a refused body is read and dropped, so that the client gets to read why."""
VERSIONS = frozenset({HttpVersion10, HttpVersion11})
TOO_MANY_HEADERS = "Too many headers received"
"""How aiohttp says it; it has no class of its own for it."""


def error_response(error: ApiError) -> web.Response:
    """`error` as an HTTP response."""
    response = web.Response(
        status=error.status,
        body=encode_json(error.envelope),
        headers=dict(error.headers),
        content_type="application/json",
    )
    if error.headers.get(hdrs.CONNECTION) == "close":
        response.force_close()  # aiohttp does not look at the header
    return response


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and the seconds a request's head and the reading of an answer may take."""

    num: int
    head_s: float
    write_s: float

    @classmethod
    def of(cls, settings: ServeSettings) -> Self:
        """Those a server is started with."""
        return cls(settings.max_connections, settings.body_timeout, settings.write_timeout)


class _Connection(RequestHandler):
    __slots__ = ("_arriving", "_cutting", "_head_is_late", "_limits")

    def __init__(self, server: web.Server, limits: ConnectionLimits, **options: object) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)  # type: ignore[arg-type]
        self._limits = limits
        self._arriving: StreamReader = EMPTY_PAYLOAD
        """The body of the last request whose head has come."""
        self._head_is_late: asyncio.TimerHandle | None = None
        self._cutting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve the connection unless there are too many."""
        assert self._manager is not None
        assert isinstance(transport, asyncio.WriteTransport)
        if len(self._manager.connections) >= self._limits.num:
            _refuse(transport, unavailable(f"{self._limits.num} connections are open, the limit"))
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends; from the first byte of a request's head, the rest of it has a time limit."""
        super().data_received(data)
        self._refuse_unknown_versions()
        self._end_broken_body()
        waits_for_head = self._waiter is not None and not self._waiter.done()
        if not waits_for_head and self._head_is_late is not None:
            self._head_is_late.cancel()
            self._head_is_late = None
        elif waits_for_head and self._head_is_late is None:
            loop = asyncio.get_running_loop()
            self._head_is_late = loop.call_later(self._limits.head_s, self._give_up_on_head)

    def _refuse_unknown_versions(self) -> None:
        """Let what is neither HTTP/1.0 nor 1.1 be answered as no HTTP: aiohttp would answer in the client's version."""
        for place, (message, payload) in enumerate(self._messages):
            if not isinstance(message, _ErrInfo) and message.version not in VERSIONS:
                error = BadHttpMessage("unknown version")
                self._messages[place] = (_ErrInfo(status=400, exc=error, message=error.message), payload)

    def _end_broken_body(self) -> None:
        """Let a body that breaks off fail where it is read: aiohttp queues the fault as a request behind it."""
        for message, body in self._messages:
            if not isinstance(message, _ErrInfo):
                self._arriving = body
            elif not self._arriving.is_eof():
                self._arriving.set_exception(message.exc or BadHttpMessage(message.message))
                self._arriving.feed_eof()  # nothing follows that could be read and dropped

    def log_exception(self, *args: object, **options: object) -> None:
        """Log a fault of ours; that a body breaks whose refusal is out already is its client's."""
        if not isinstance(options.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **options)

    def _give_up_on_head(self) -> None:
        if self.transport is not None:
            message = f"the request's head did not arrive within {self._limits.head_s} s"
            _refuse(self.transport, ApiError(408, message, code="head_timeout"))

    async def start(self) -> None:
        """Serve requests until the connection is to be closed, and see to it that it is, read or unread."""
        transport = self.transport
        try:
            await super().start()
        finally:
            if self._manager is not None and transport is not None and transport.is_closing():
                # Not lost yet. A closed transport first sends what it still holds, for as long as it takes.
                loop = asyncio.get_running_loop()
                self._cutting = loop.call_later(self._limits.write_s, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let go of everything."""
        for timer in (self._head_is_late, self._cutting):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's own words, which may quote the request
    ) -> web.StreamResponse:
        """The answer to what is no HTTP request, or could not be handled at all. Closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, there is no room for an error") from exc
        if isinstance(exc, LineTooLong):
            error = ApiError(431, "a line of the request's head is too long", code="header_too_large")
        elif isinstance(exc, BadHttpMessage) and exc.message == TOO_MANY_HEADERS:
            error = ApiError(431, "the request has too many headers", code="header_too_large")
        elif status == 400:
            error = invalid(None, "this is not a valid HTTP request")
        else:
            self.log_exception("request failed outside its handler", exc_info=exc)
            error = internal_error()
        log_refused(error, None)
        response = error_response(error)
        response.headers[hdrs.SERVER] = "lockstep"
        response.force_close()
        return response


class _Server(web.Server):
    def __init__(self, server: web.Server, limits: ConnectionLimits, **options: object) -> None:
        super().__init__(server.request_handler, request_factory=server.request_factory, handler_cancellation=True)
        self._limits = limits
        self._options = options

    def __call__(self) -> RequestHandler:
        """The protocol of a new connection."""
        return _Connection(self, self._limits, **self._options)


class Runner(web.AppRunner):
    """aiohttp's runner of an application, over our connections. Use it wherever an `AppRunner` is used."""

    def __init__(self, app: web.Application, limits: ConnectionLimits, *, shutdown_timeout: float) -> None:
        super().__init__(app, handle_signals=False, access_log=None, shutdown_timeout=shutdown_timeout)
        self._limits = limits

    async def _make_server(self) -> web.Server:
        return _Server(
            await super()._make_server(),
            self._limits,
            access_log=None,
            keepalive_timeout=IDLE_TIMEOUT_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )


def _refuse(transport: asyncio.WriteTransport, error: ApiError) -> None:
    """Answer `error` where there is no request to answer, and close."""
    log_refused(error, None)
    body = encode_json(error.envelope)
    head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "Content-Type: application/json"]
    head += [f"{name}: {value}" for name, value in error.headers.items()]
    head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    transport.write("\r\n".join(head).encode() + body)
    transport.close()
