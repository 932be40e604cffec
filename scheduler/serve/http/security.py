"""Who may call: API keys, and which web pages' browsers.

A browser lets any page send requests to a server on the user's own machine. So a request that carries a foreign
Origin is refused, and so is one that names a host no loopback server has: a page whose domain was re-bound to
127.0.0.1 (DNS rebinding) sends its own name.
"""

import ipaddress
import re

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from scheduler.serve.keys import ApiKeys
from scheduler.serve.settings import ANY_ORIGIN, ServeSettings
from scheduler.serve.wire.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ping"})
METRICS_PATHS = frozenset({"/metrics"})
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Names no public DNS server answers for."""
PREFLIGHT_MAX_AGE_S = 600
EXPOSED_HEADERS = "Retry-After"

_AUTHORITY = re.compile(r"(?P<name>\[[^\s@/?#\[\]\\]+\]|[^\s:@/?#\[\]\\]+)(:\d*)?")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_DEFAULT_PORT = re.compile(r"(?<=^http)(://.*):80$|(?<=^https)(://.*):443$")


def guard(settings: ServeSettings, keys: ApiKeys) -> Middleware:
    """The middleware that lets through who may call and answers preflights. It raises `ApiError` 401 or 403."""
    open_paths = OPEN_PATHS | METRICS_PATHS if settings.open_metrics else OPEN_PATHS

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not settings.is_public:
            _check_host(request)
        _check_origin(request, settings)
        if _is_preflight(request):
            return web.Response(status=204, headers=_preflight_headers(request))
        if keys.are_needed and request.path not in open_paths:
            _check_key(request, keys)
        return await handler(request)

    return check


def cors_headers(request: web.BaseRequest, settings: ServeSettings) -> dict[str, str]:
    """The headers that let the page at the request's Origin read the answer; none if there is no such page."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or not _is_allowed(origin, settings):
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": EXPOSED_HEADERS,
        "Vary": "Origin",
    }


def _check_key(request: web.Request, keys: ApiKeys) -> None:
    presented = [key for key in (_bearer(request), request.headers.get("x-api-key")) if key]
    if not any(keys.allow(key.encode("utf-8", "surrogateescape")) for key in presented):
        message = "the API key is not valid" if presented else "an API key is needed: Authorization: Bearer <key>"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _bearer(request: web.Request) -> str | None:
    scheme, _, credentials = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _check_host(request: web.Request) -> None:
    if request.transport is None or not isinstance(request.transport.get_extra_info("sockname"), tuple):
        return  # a Unix socket: no browser gets there
    named = request.headers.getall(hdrs.HOST, [])
    if _ABSOLUTE.match(request.raw_path):  # `GET http://name/path`, as to a proxy
        named.append(request.host)
    for authority in filter(None, named):
        name = _host_name(authority)
        if not _is_local_name(name):
            raise ApiError(403, f"the host {name!r} is not this server's", code="host_not_allowed")


def _host_name(authority: str) -> str:
    """The name in `name:port`; whatever is none stays whole."""
    parts = _AUTHORITY.fullmatch(authority)
    return authority if parts is None else parts["name"].strip("[]").lower().removesuffix(".")


def _is_local_name(name: str) -> bool:
    if name == "localhost" or name.endswith(LOCAL_SUFFIXES):
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _check_origin(request: web.Request, settings: ServeSettings) -> None:
    own = f"{request.scheme}://{request.headers.get(hdrs.HOST)}"
    for origin in request.headers.getall(hdrs.ORIGIN, []):
        if not _is_allowed(origin, settings) and _normal(origin) != _normal(own):
            raise ApiError(403, f"the origin {origin!r} is not allowed (--cors-origin)", code="origin_not_allowed")


def _is_allowed(origin: str, settings: ServeSettings) -> bool:
    return ANY_ORIGIN in settings.cors_origin or _normal(origin) in map(_normal, settings.cors_origin)


def _normal(origin: str) -> str:
    """`origin` as browsers write it."""
    return _DEFAULT_PORT.sub(r"\1\2", origin.lower())


def _is_preflight(request: web.Request) -> bool:
    return (
        request.method == "OPTIONS"
        and hdrs.ORIGIN in request.headers
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
