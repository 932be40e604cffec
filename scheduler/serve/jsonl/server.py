"""The JSON socket: one JSON object a line, many requests at once on one connection, over TCP or a Unix socket.

`docs/socket-protocol.md` is the protocol. A connection takes one line after the other; each request it has taken is
answered by a task of its own, and whatever ends the connection ends them all.
"""

import asyncio
import contextlib
import re

import msgspec
import structlog

from scheduler.events import Finished
from scheduler.serve.call import Call, RunningCall
from scheduler.serve.jsonl.form import JsonlForm, jsonl_call
from scheduler.serve.jsonl.lines import HangUpError, LineWriter, lines_of
from scheduler.serve.keys import ApiKeys
from scheduler.serve.logs import log_refused
from scheduler.serve.service import Service
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.decode import decode
from scheduler.serve.wire.errors import REFUSALS, ApiError, as_api_error, internal_error, invalid
from scheduler.serve.wire.socket import Auth, Cancel, ErrorEvent, Generate, Id, Operation

FIRST_PROBE_S, LAST_PROBE_S = 0.05, 1.0
"""How often a client that has shut down its sending side is tried for still reading: often at first, then seldom."""

LOGGED_PATH = "json-socket"
"""Where a refused line was sent to, as the log has it."""

_HTTP_REQUEST_LINE = re.compile(rb"[A-Z]+ \S+ HTTP/\d")


class _OnlyId(msgspec.Struct):
    id: Id | None = None


_OPERATION: msgspec.json.Decoder[Operation] = msgspec.json.Decoder(Operation)
_ONLY_ID = msgspec.json.Decoder(_OnlyId)


class JsonlServer:
    """Answers the connections of any number of listening sockets."""

    def __init__(self, service: Service, settings: ServeSettings, keys: ApiKeys) -> None:
        self._service = service
        self._settings = settings
        self._keys = keys
        self._connections: dict[asyncio.Task[None], _Connection] = {}

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends: the callback of `asyncio.start_server`."""
        task = asyncio.current_task()
        assert task is not None
        limit = self._settings.max_connections
        is_one_too_many = len(self._connections) >= limit
        connection = self._connections[task] = _Connection(self._service, self._settings, self._keys, reader, writer)
        try:
            if is_one_too_many:
                error = HangUpError(503, f"{limit} connections are open, the limit", kind="service_unavailable")
                await connection.hang_up(error)
            else:
                await connection.serve()
        except asyncio.CancelledError:
            # By `close`. The task ends here; Python 3.11 logs a fault of its own if a connection's task is cancelled.
            pass
        finally:
            del self._connections[task]

    async def close(self, timeout_s: float) -> None:
        """End every connection. A client gets `timeout_s` to take the last events of requests that have ended."""
        connections = dict(self._connections)
        answers = [answer for connection in connections.values() for answer in connection.answers]
        if answers:
            await asyncio.wait(answers, timeout=timeout_s)
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections, timeout=timeout_s)
        for connection in connections.values():
            connection.abort()


class _Connection:
    """One client. `answers` are the tasks that answer its running requests."""

    def __init__(
        self,
        service: Service,
        settings: ServeSettings,
        keys: ApiKeys,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.answers: set[asyncio.Task[None]] = set()
        self._service = service
        self._settings = settings
        self._reader = reader
        self._writer = LineWriter(writer, timeout_s=settings.write_timeout)
        self._running: dict[Id, RunningCall] = {}
        self._keys = keys
        self._key = b""

    async def serve(self) -> None:
        """Take lines until the client sends no more and has all its answers, or is gone."""
        lines = lines_of(
            self._reader,
            max_bytes=self._settings.max_body,
            timeout_s=self._settings.body_timeout,
            is_hurried=self._keys.are_needed,  # a stranger must not hold a place among the connections
        )
        try:
            async for line in lines:
                if line.strip():
                    await self._take(line)
            await self._finish_answers()
        except HangUpError as refusal:
            self._end_requests()
            await self.hang_up(refusal)
        except ConnectionError:
            pass
        finally:
            self._end_requests()
            await self._writer.close()

    async def hang_up(self, error: HangUpError) -> None:
        """Say why there is no service here, and close."""
        with contextlib.suppress(ConnectionError):
            await self._refuse(None, error)
            await self._writer.linger(self._reader)
        await self._writer.close()

    def abort(self) -> None:
        """Close at once, whatever has not been sent."""
        self._writer.abort()

    async def _take(self, line: bytes) -> None:
        """Do what one line asks for, or say why not. Raises `HangUpError` where nothing good can follow."""
        if _HTTP_REQUEST_LINE.match(line):
            # A web page can make a browser send this, with lines of the page's own choice behind it.
            raise HangUpError(400, "this is the JSON socket, not HTTP")
        try:
            operation = await self._service.off_loop(decode, line, _OPERATION)
        except ApiError as refusal:
            self._check_authorised()
            await self._refuse(self._blamed(line), refusal)
            return
        match operation:
            case Auth():
                self._authorise(operation.key)
            case Cancel():
                self._check_authorised()
                if (running := self._running.get(operation.id)) is not None:
                    running.close()
            case Generate():
                self._check_authorised()
                await self._generate(operation)

    def _authorise(self, key: str) -> None:
        self._key = key.encode()
        if not self._is_authorised:
            raise HangUpError(401, "the API key is not valid", code="invalid_api_key")

    @property
    def _is_authorised(self) -> bool:
        """Whether the client may ask now: its key may have been withdrawn since it was presented."""
        return not self._keys.are_needed or self._keys.allow(self._key)

    def _check_authorised(self) -> None:
        if not self._is_authorised:
            message = "the API key is not valid any more"
            if not self._key:
                message = 'an API key is needed: {"op": "auth", "key": ...} as the first line'
            raise HangUpError(401, message, code="invalid_api_key")

    async def _generate(self, operation: Generate) -> None:
        if operation.id in self._running:
            error = invalid("id", f"id {operation.id!r} is that of a running request of this connection")
            await self._refuse(None, error)
            return
        try:
            call = await self._service.off_loop(jsonl_call, self._service, operation)
            running = RunningCall(self._service, call, headers={})
        except REFUSALS as refusal:
            await self._refuse(operation.id, as_api_error(refusal))
            return
        except Exception:  # noqa: BLE001 - logged; it ends this request, not the others of the connection
            structlog.get_logger("lockstep.jsonl").exception("request failed")
            await self._refuse(operation.id, internal_error())
            return
        self._running[operation.id] = running
        answer = asyncio.create_task(self._answer(operation.id, call, running))
        self.answers.add(answer)
        answer.add_done_callback(self.answers.discard)

    async def _answer(self, client_id: Id, call: Call, running: RunningCall) -> None:
        """Send the events of one request. A client that does not take them loses its connection."""
        try:
            failure = await self._send_events(client_id, call, running)
            if failure is not None:
                running.close()
                self._forget(client_id, running)
                await self._refuse(client_id, failure)
        except ConnectionError:
            self.abort()

    async def _send_events(self, client_id: Id, call: Call, running: RunningCall) -> ApiError | None:
        """None once the last event is sent, else what to tell the client. Raises `ConnectionError`."""
        form = JsonlForm(self._service, call, client_id)
        limit = self._settings.request_timeout
        try:
            async with asyncio.timeout(limit):
                finished = await self._send_news(form, running)
            # Before the client can know: it may use the id again at once.
            self._forget(client_id, running)
            # However late the client takes this, it is the last: the time limit is over.
            await self._writer.send(form.line(finished))
        except TimeoutError:
            return ApiError(504, f"the request took longer than {limit} s", kind="timeout", code="request_timeout")
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - logged; it ends this request, not the others of the connection
            structlog.get_logger("lockstep.jsonl").exception("answer failed", request_id=call.id)
            return internal_error()
        return None

    async def _send_news(self, form: JsonlForm, running: RunningCall) -> Finished:
        """The last event, once all before it are sent."""
        async with contextlib.aclosing(running.events()) as events:
            async for _, event in events:
                if isinstance(event, Finished):
                    return event
                line = form.line(event)
                if line is not None:
                    await self._writer.send(line)
        raise AssertionError("the events ended without Finished")

    def _forget(self, client_id: Id, running: RunningCall) -> None:
        """Let the id be used again, unless it is already."""
        if self._running.get(client_id) is running:
            del self._running[client_id]

    async def _finish_answers(self) -> None:
        """Wait until every request is answered. A client that has closed altogether shows when it is written to."""
        probe_s = FIRST_PROBE_S
        while self.answers:
            await self._writer.probe()
            await asyncio.wait(self.answers, timeout=probe_s)
            probe_s = min(2 * probe_s, LAST_PROBE_S)

    def _end_requests(self) -> None:
        for answer in self.answers:
            answer.cancel()
        for running in self._running.values():
            running.close()
        self._running.clear()

    async def _refuse(self, client_id: Id | None, error: ApiError) -> None:
        log_refused(error, LOGGED_PATH)
        await self._writer.send(ErrorEvent(id=client_id, error=error.envelope.error))

    def _blamed(self, line: bytes) -> Id | None:
        """The id a refused line carries, if it can be found and is not that of a running request."""
        try:
            client_id = _ONLY_ID.decode(line).id
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        return None if client_id in self._running else client_id
