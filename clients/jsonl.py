"""An async client of the JSON socket: many requests at once on one connection (`docs/socket-protocol.md`)."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clients.api import Json
from clients.errors import ServerError, UnreachableError

LINE_LIMIT = 64 * 2**20
"""Bytes of the longest event line that is taken."""


class JsonlClient:
    """An async context manager around one connection: `JsonlClient("127.0.0.1", 8001)` or `JsonlClient(socket_path)`.

    Whatever goes wrong is a `ClientError`: `UnreachableError` or `ServerError`.
    """

    def __init__(self, host: str | Path, port: int | None = None, *, api_key: str | None = None) -> None:
        """`host` is a Unix socket's path if there is no `port`."""
        self._host = host
        self._port = port
        self._api_key = api_key
        self._ids = itertools.count(1)
        self._events: dict[int, asyncio.Queue[Json | UnreachableError]] = {}
        self._lost: UnreachableError | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            if self._port is None:
                reader, self._writer = await asyncio.open_unix_connection(self._host, limit=LINE_LIMIT)
            else:
                reader, self._writer = await asyncio.open_connection(str(self._host), self._port, limit=LINE_LIMIT)
        except OSError as error:
            raise UnreachableError(f"no JSON socket at {self._address}: {error.strerror or error}") from error
        if self._api_key is not None:
            await self._send({"op": "auth", "key": self._api_key})
        self._reading = asyncio.create_task(self._read(reader))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._writer is not None
        assert self._reading is not None
        self._reading.cancel()
        self._writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self._reading
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def generate(self, **fields: Any) -> AsyncGenerator[Json, None]:
        """The events of one request, `finished` the last. Closed before that (`contextlib.aclosing`), it is cancelled.

        `fields` are those of the `generate` operation but its id: `prompt` or `messages`, `max_tokens`, ...
        """
        request_id = next(self._ids)
        events = self._events[request_id] = asyncio.Queue()
        is_over = False
        try:
            await self._send({"op": "generate", "id": request_id, **fields})
            while not is_over:
                event = await events.get()
                if isinstance(event, UnreachableError):
                    raise event
                is_over = event["event"] in {"finished", "error"}
                if event["event"] == "error":
                    raise _server_error(event)
                yield event
        finally:
            del self._events[request_id]
            if not is_over:
                with contextlib.suppress(UnreachableError):
                    await self._send({"op": "cancel", "id": request_id})

    async def _send(self, operation: Json) -> None:
        assert self._writer is not None, "use `async with JsonlClient(...)`"
        if self._lost is not None:
            raise self._lost
        try:
            self._writer.write(json.dumps(operation).encode() + b"\n")
            await self._writer.drain()
        except ConnectionError as error:
            raise UnreachableError(f"{self._address}: {error.strerror or error}") from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand each event to the request it belongs to, and the end of the connection to all."""
        reason = "the server closed the connection"
        try:
            async for line in reader:
                event = json.loads(line)
                if event["id"] is None:
                    reason = event["error"]["message"]
                elif queue := self._events.get(event["id"]):
                    queue.put_nowait(event)
        except (OSError, ValueError) as error:
            reason = str(error)
        self._lost = UnreachableError(f"{self._address}: {reason}")
        for queue in self._events.values():
            queue.put_nowait(self._lost)

    @property
    def _address(self) -> str:
        return str(self._host) if self._port is None else f"{self._host}:{self._port}"


def _server_error(event: Json) -> ServerError:
    error = event["error"]
    return ServerError(error["message"], param=error["param"], code=error["code"])
