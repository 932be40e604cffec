"""Who may call: API keys, and which web pages' browsers.

A browser lets any page send requests to a server on the user's own machine. So a request that carries a foreign
Origin is refused, and so is one that names a host no loopback server has: a page whose domain was re-bound to
127.0.0.1 (DNS rebinding) sends its own name.
"""

import hmac
import ipaddress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ping"})
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Names no public DNS server answers for."""
PREFLIGHT_MAX_AGE_S = 600
EXPOSED_HEADERS = "Retry-After"


def guard(settings: ServeSettings) -> Middleware:
    """The middleware that lets through who may call and answers preflights. It raises `ApiError` 401 or 403."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not settings.is_public:
            _check_host(request)
        _check_origin(request, settings)
        if _is_preflight(request):
            return web.Response(status=204, headers=_preflight_headers(request))
        if settings.api_key and request.path not in OPEN_PATHS:
            _check_key(request, settings.api_key)
        return await handler(request)

    return check


def cors_headers(request: web.BaseRequest, settings: ServeSettings) -> dict[str, str]:
    """The headers that let the page at the request's Origin read the answer; none if there is no such page."""
    origin = request.headers.get("Origin")
    if origin is None or not _is_allowed(origin, settings):
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": EXPOSED_HEADERS,
        "Vary": "Origin",
    }


def is_valid_key(presented: bytes, keys: tuple[str, ...]) -> bool:
    """Whether `presented` is one of `keys`. How long it takes tells nothing of which one was nearly right."""
    matches = [hmac.compare_digest(presented, key.encode("utf-8", "surrogateescape")) for key in keys]
    return any(matches)


def _check_key(request: web.Request, keys: tuple[str, ...]) -> None:
    presented = (_bearer(request) or request.headers.get("x-api-key") or "").encode("utf-8", "surrogateescape")
    if not is_valid_key(presented, keys):
        message = "an API key is needed: Authorization: Bearer <key>" if not presented else "the API key is not valid"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _bearer(request: web.Request) -> str | None:
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _check_host(request: web.Request) -> None:
    if request.transport is None or not isinstance(request.transport.get_extra_info("sockname"), tuple):
        return  # a Unix socket: no browser gets there
    name = _host_name(request)
    if name is not None and not _is_local_name(name):
        raise ApiError(403, f"the host {name!r} is not this server's", code="host_not_allowed")


def _host_name(request: web.Request) -> str | None:
    host = request.headers.get("Host")
    if not host:
        return None
    try:
        return URL(f"http://{host}").host or ""
    except ValueError:
        return host


def _is_local_name(name: str) -> bool:
    if name.lower().rstrip(".") == "localhost" or name.lower().endswith(LOCAL_SUFFIXES):
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _check_origin(request: web.Request, settings: ServeSettings) -> None:
    origin = request.headers.get("Origin")
    if origin is None or _is_allowed(origin, settings):
        return
    if origin != f"{request.scheme}://{request.headers.get('Host')}":
        raise ApiError(403, f"the origin {origin!r} is not allowed (--cors-origin)", code="origin_not_allowed")


def _is_allowed(origin: str, settings: ServeSettings) -> bool:
    return "*" in settings.cors_origin or origin in settings.cors_origin


def _is_preflight(request: web.Request) -> bool:
    return (
        request.method == "OPTIONS"
        and "Origin" in request.headers
        and "Access-Control-Request-Method" in request.headers
    )


def _preflight_headers(request: web.Request) -> dict[str, str]:
    return {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": request.headers.get(
            "Access-Control-Request-Headers", "Authorization, Content-Type, X-Api-Key"
        ),
        "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
    }
