"""Bodies: one read within its limits, one written within a client's patience and ours."""

import asyncio
from collections.abc import Awaitable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from scheduler.serve.http.serving import SETTINGS
from scheduler.serve.wire.encode import encode_json
from scheduler.serve.wire.errors import ApiError, invalid


class SlowReaderError(ConnectionError):
    """A client left its answer unread for too long; the connection has been cut."""


async def deliver(request: web.Request, writing: Awaitable[None], timeout_s: float) -> None:
    """Wait until the client has taken enough for `writing` to end. Raises `ConnectionError` if it does not."""
    try:
        async with asyncio.timeout(timeout_s):
            await writing
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise SlowReaderError(f"the client took nothing for {timeout_s} s") from None


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises `ApiError`: 413 too large, 408 too slow, 400 broken encoding."""
    settings = request.app[SETTINGS]
    if (request.content_length or 0) > settings.max_body:
        raise too_large(settings.max_body)
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await request.read()
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout} s"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(settings.max_body) from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise invalid(None, "the body's transfer or content encoding is broken") from None


def too_large(max_body: int) -> ApiError:
    """The 413 that says how much would have been taken."""
    return ApiError(413, f"the body is larger than {max_body} bytes", code="body_too_large")


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as a JSON response."""
    return web.Response(status=status, body=encode_json(value), content_type="application/json")
