"""A server's life: listen, load, serve until told to stop, let what runs finish, leave nothing behind."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog
from aiohttp import web

from scheduler.loop import EngineLoop
from scheduler.serve import logs
from scheduler.serve.http.protocol import Runner
from scheduler.serve.http.routes import build_app
from scheduler.serve.http.serving import Serving
from scheduler.serve.jsonl.server import JsonlServer
from scheduler.serve.listen import BACKLOG, UnixListener, listen_tcp
from scheduler.serve.load import Loaded, load
from scheduler.serve.service import ServedModel, Service
from scheduler.serve.settings import ServeSettings

T = TypeVar("T")
Load = Callable[[ServeSettings], Loaded]

LAST_EVENTS_S = 5.0
"""How long clients get, once every request has ended, to take what is still on its way to them."""
SPARE_FILES = 256
"""Open files besides the connections of HTTP and of the JSON socket, generously."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound to here
"""Where a server that listens on every address is reached from its own machine."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger("lockstep")


def run(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT: the exit code, 0 unless the engine failed.

    Raises `LockstepError` for whatever keeps the server from starting.
    """
    logs.configure(settings.log_format)
    _allow_files(SPARE_FILES + 2 * settings.max_connections)
    return asyncio.run(serve(settings))


async def serve(settings: ServeSettings, load: Load = load) -> int:
    """`run` within an event loop, with a model that `load` makes. It takes over this process's signals and stdout."""
    server = Server(settings)
    with _stop_signal(at_once=server.abandon) as stopping:
        async with server:
            starting = asyncio.create_task(server.start(load))
            await _first_of(starting, stopping)
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
                return 0
            ticking = starting.result()
            _announce(server.ready)
            await _first_of(ticking, stopping)
            if ticking.done():
                _log.critical("the engine has failed", exc_info=ticking.exception())
                return 1
            _log.info("stopping", running=server.num_unfinished, grace_s=settings.grace)
            await server.drain()
    return 0


class Server:
    """Sockets, model and engine of one server, in this event loop.

    As a context manager it listens from the start: HTTP answers 503 and the JSON socket keeps its clients waiting until
    `start` has returned. Leaving it ends every request and closes everything; `drain` before gives requests time.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._serving = Serving()
        self._resources = contextlib.AsyncExitStack()
        self._http: list[socket.socket] = []
        self._jsonl: list[socket.socket] = []
        self._unix: UnixListener | None = None

    async def __aenter__(self) -> Self:
        """Open every socket. Raises `ListenError`."""
        settings = self._settings
        self._resources.callback(self._close_service)
        try:
            self._http = self._listen(settings.port)
            if settings.jsonl_port is not None:
                self._jsonl = self._listen(settings.jsonl_port)
            if settings.unix_socket is not None:
                self._unix = UnixListener(settings.unix_socket)
                self._resources.callback(self._unix.close)
            await self._start_http()
        except BaseException:
            await self._resources.aclose()
            raise
        if settings.is_public and not settings.api_key:
            _log.warning("whoever can reach this host may use the server: set --api-key", host=settings.host)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._resources.aclose()

    async def start(self, load: Load = load) -> "asyncio.Task[None]":
        """Load the model and serve it. The task that ticks; it ends before `stop` only by failing.

        Raises what `load` raises.
        """
        loaded = await _in_daemon_thread(lambda: load(self._settings))
        self._resources.callback(loaded.close)
        engine = EngineLoop(loaded.scheduler, loaded.backend, loaded.tokenizer, on_finished=logs.log_finished)
        service = Service(engine, loaded.tokenizer, loaded.template, self._served(loaded))
        lag = asyncio.create_task(service.exposition.measure_lag())
        self._resources.callback(lag.cancel)
        ticking = asyncio.create_task(engine.run())
        await self._start_jsonl(service)
        self._resources.push_async_callback(engine.stop)
        self._serving.service = service
        return ticking

    async def drain(self) -> None:
        """Take in nothing new, and return when every request has finished or the grace is over."""
        engine = self._serving.get().engine
        engine.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.grace):
                await engine.join()

    def abandon(self) -> None:
        """Remove what would outlive the process: it is about to end without leaving this context."""
        if self._unix is not None:
            self._unix.close()

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        engine = self._serving.get().engine
        return engine.num_running + engine.num_waiting

    @property
    def port(self) -> int:
        """The TCP port of HTTP."""
        return _port(self._http)

    @property
    def jsonl_port(self) -> int | None:
        """The TCP port of the JSON socket, if it is open."""
        return _port(self._jsonl) if self._jsonl else None

    @property
    def url(self) -> str:
        """Where this machine reaches HTTP."""
        host = ANY_ADDRESS.get(self._settings.host, self._settings.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def ready(self) -> dict[str, Any]:
        """What programs that started the server need to know."""
        return {
            "event": "ready",
            "url": self.url,
            "host": self._settings.host,
            "port": self.port,
            "jsonl_port": self.jsonl_port,
            "unix_socket": None if self._unix is None else str(self._unix.path),
            "model": self._settings.model_name,
            "pid": os.getpid(),
        }

    def _close_service(self) -> None:
        if self._serving.service is not None:
            self._serving.service.close()

    def _listen(self, port: int) -> list[socket.socket]:
        sockets = listen_tcp(self._settings.host, port)
        for sock in sockets:
            self._resources.callback(sock.close)
        return sockets

    async def _start_http(self) -> None:
        runner = Runner(
            build_app(self._serving, self._settings),
            max_connections=self._settings.max_connections,
            shutdown_timeout=LAST_EVENTS_S,
        )
        await runner.setup()
        self._resources.push_async_callback(runner.cleanup)
        for sock in self._http:
            await web.SockSite(runner, sock, backlog=BACKLOG).start()

    async def _start_jsonl(self, service: Service) -> None:
        jsonl = JsonlServer(service, self._settings)
        servers = [await asyncio.start_server(jsonl, sock=sock, backlog=BACKLOG) for sock in self._jsonl]
        if self._unix is not None:
            servers.append(await asyncio.start_unix_server(jsonl, sock=self._unix.socket, backlog=BACKLOG))
        self._resources.push_async_callback(jsonl.close, LAST_EVENTS_S)
        for server in servers:
            self._resources.callback(server.close)

    def _served(self, loaded: Loaded) -> ServedModel:
        return ServedModel(
            names=self._settings.model_names,
            accepts_any_name=self._settings.accepts_any_model_name,
            max_len=loaded.max_len,
            fingerprint=loaded.fingerprint,
            created=int(time.time()),
        )


def _announce(ready: dict[str, Any]) -> None:
    """Print a line for programs that wait for it. Where nobody can read it, that does not end the server."""
    try:
        print(json.dumps(ready), flush=True)  # noqa: T201 - stdout is for this line alone
    except OSError as error:
        _log.warning("the ready line could not be printed", reason=os.strerror(error.errno or 0).lower())
        # The line is still in stdout's buffer, and would fail once more at the end of the process.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _allow_files(needed: int) -> None:
    """Raise this process's limit of open files to `needed`, as far as it may be raised: every connection is one."""
    allowed, possible = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in {allowed, possible}:
        needed = min(needed, possible)
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, possible))


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _port(sockets: list[socket.socket]) -> int:
    port: int = sockets[0].getsockname()[1]
    return port


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises. A process told to stop does not wait for it, as it would for an executor's."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()

    def target() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=target, name="load", daemon=True).start()
    return await asyncio.wrap_future(outcome)


@contextlib.contextmanager
def _stop_signal(at_once: Callable[[], None]) -> "Iterator[asyncio.Future[None]]":
    """A future that the first SIGTERM or SIGINT fulfils. The second one calls `at_once` and ends the process."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if stopping.done():
            at_once()
            sys.stderr.flush()
            os._exit(128 + number)
        stopping.set_result(None)

    numbers = signal.SIGTERM, signal.SIGINT
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stopping
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
