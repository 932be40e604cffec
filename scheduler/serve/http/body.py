"""Bodies: one read within its limits, one written within a client's patience and ours."""

import asyncio
from collections.abc import Awaitable, Mapping
from types import MappingProxyType

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from scheduler.serve.http.app_keys import SETTINGS
from scheduler.serve.wire.encode import encode_json
from scheduler.serve.wire.errors import ApiError

CLOSE: Mapping[str, str] = MappingProxyType({hdrs.CONNECTION: "close"})
"""For refusals of a body that has not been read to its end."""


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


def check_announced(request: web.Request) -> None:
    """Raise `ApiError` if the head alone says that the body will not be read: 413 too large, 415 packed."""
    settings = request.app[SETTINGS]
    for name, as_it_is in ((hdrs.CONTENT_ENCODING, {"", "identity"}), (hdrs.TRANSFER_ENCODING, {"", "chunked"})):
        encodings = [value.strip() for line in request.headers.getall(name, []) for value in line.split(",")]
        if as_it_is.issuperset(value.lower() for value in encodings):
            continue
        # What is small may unpack to what is not: nothing here unpacks anything.
        message = f"bodies are taken as they are, not with {name}: {', '.join(encodings)}"
        raise ApiError(415, message, code="encoding_not_supported", headers={**CLOSE, hdrs.ACCEPT_ENCODING: "identity"})
    if (request.content_length or 0) > settings.max_body:
        raise too_large(settings.max_body)


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises `ApiError`: 413 too large, 415 packed, 408 too slow, 400 broken transfer encoding."""
    check_announced(request)
    settings = request.app[SETTINGS]
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await request.read()
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout} s"
        raise ApiError(408, message, code="body_timeout", headers=CLOSE) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(settings.max_body) from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise ApiError(400, "the body's transfer encoding is broken", headers=CLOSE) from None


def too_large(max_body: int) -> ApiError:
    """The 413 that says how much would have been taken."""
    return ApiError(413, f"the body is larger than {max_body} bytes", code="body_too_large", headers=CLOSE)


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as a JSON response."""
    return web.Response(status=status, body=encode_json(value), content_type="application/json")
