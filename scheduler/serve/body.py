"""Bodies: one read within its limits, one written."""

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from scheduler.serve.serving import SETTINGS
from scheduler.serve.wire.encode import encode_json
from scheduler.serve.wire.errors import ApiError, invalid


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
