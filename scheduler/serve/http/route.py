"""One line of the routing table: what is answered where, and what the OpenAPI document says of it."""

from dataclasses import dataclass
from typing import Any

from aiohttp.typedefs import Handler


@dataclass(frozen=True, slots=True)
class Route:
    """`handler` answers `method` on `path`; the OpenAPI document describes it with the handler's docstring.

    `takes` is the Struct in the request's body. `gives` is the type of a whole answer (None: it has no success),
    `streams` those of a stream's events; an answer that is no JSON has its own `media_type`. `refusals` are the
    statuses of errors besides those any route may answer with.
    """

    method: str
    path: str
    handler: Handler
    takes: Any = None
    gives: Any = None
    streams: tuple[Any, ...] = ()
    media_type: str = "application/json"
    refusals: tuple[int, ...] = ()
