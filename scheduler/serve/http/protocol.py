"""The connection, where aiohttp would answer for itself: refusals of bytes that are no HTTP wear our envelope too.

A client that goes away cancels its handler; a client too many is told so.
"""

import asyncio

from aiohttp import hdrs, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from scheduler.serve.wire.encode import encode_json
from scheduler.serve.wire.errors import ApiError, internal_error, invalid, unavailable

IDLE_TIMEOUT_S = 75.0
"""Seconds a connection may stay open without a whole request head."""
LINGER_S = 10.0
"""Seconds the rest of a refused body is read and dropped, so that the client gets to read why."""


def error_response(error: ApiError) -> web.Response:
    """`error` as an HTTP response."""
    return web.Response(
        status=error.status,
        body=encode_json(error.envelope),
        headers=dict(error.headers),
        content_type="application/json",
    )


class _Connection(RequestHandler):
    __slots__ = ("_max_connections",)

    def __init__(self, server: web.Server, *, max_connections: int, **options: object) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)  # type: ignore[arg-type]
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Serve the connection unless there are too many."""
        assert self._manager is not None
        assert isinstance(transport, asyncio.WriteTransport)
        if len(self._manager.connections) >= self._max_connections:
            body = encode_json(unavailable(f"{self._max_connections} connections are open, the limit").envelope)
            head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            transport.write(f"{head}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n".encode() + body)
            transport.close()
        super().connection_made(transport)

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
        elif status == 400:
            error = invalid(None, "this is not a valid HTTP request")
        else:
            self.log_exception("request failed outside its handler", exc_info=exc)
            error = internal_error()
        response = error_response(error)
        response.headers[hdrs.SERVER] = "lockstep"
        response.force_close()
        return response


class _Server(web.Server):
    def __init__(self, server: web.Server, max_connections: int, **options: object) -> None:
        super().__init__(server.request_handler, request_factory=server.request_factory, handler_cancellation=True)
        self._max_connections = max_connections
        self._options = options

    def __call__(self) -> RequestHandler:
        """The protocol of a new connection."""
        return _Connection(self, max_connections=self._max_connections, **self._options)


class Runner(web.AppRunner):
    """aiohttp's runner of an application, over our connections. Use it wherever an `AppRunner` is used."""

    def __init__(self, app: web.Application, *, max_connections: int, shutdown_timeout: float) -> None:
        super().__init__(app, handle_signals=False, access_log=None, shutdown_timeout=shutdown_timeout)
        self._max_connections = max_connections

    async def _make_server(self) -> web.Server:
        return _Server(
            await super()._make_server(),
            self._max_connections,
            access_log=None,
            keepalive_timeout=IDLE_TIMEOUT_S,
            lingering_time=LINGER_S,
        )
