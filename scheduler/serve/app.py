"""A server's life: listen, load, serve until told to stop, let what runs finish, leave nothing behind."""

import asyncio
import concurrent.futures
import contextlib
import gc
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

from scheduler.events import Finished
from scheduler.loop import EngineLoop
from scheduler.serve import logs
from scheduler.serve.http.app_keys import Serving
from scheduler.serve.http.protocol import ConnectionLimits, Runner
from scheduler.serve.http.routes import build_app
from scheduler.serve.jsonl.server import JsonlServer
from scheduler.serve.keys import ApiKeys, KeyFileError
from scheduler.serve.listen import ACCEPTED_AT_ONCE, BACKLOG, UnixListener, listen_tcp
from scheduler.serve.load import Loaded, load
from scheduler.serve.service import ServedModel, Service
from scheduler.serve.settings import ANY_ORIGIN, ServeSettings
from scheduler.serve.tls import HANDSHAKE_S, Certificate, CertificateError
from scheduler.serve.tracing import Tracing, tracing_of

T = TypeVar("T")
Load = Callable[[ServeSettings], Loaded]

LAST_EVENTS_S = 5.0
"""How long clients get, once every request has ended, to take what is still on its way to them."""
LAST_SPANS_S = 2.0
"""How long the receiver of traces gets to take the last ones."""
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
    gc.disable()  # until `_load_for_good` is done
    return asyncio.run(serve(settings, _load_for_good))


def _load_for_good(settings: ServeSettings) -> Loaded:
    """`load`, with nothing of what there is by then ever looked at by the garbage collector again.

    A vocabulary is hundreds of thousands of objects that stay: to walk them takes time while they are made, and would
    stop every stream later.
    """
    try:
        return load(settings)
    finally:
        gc.freeze()
        gc.enable()


async def serve(settings: ServeSettings, load: Load = load) -> int:
    """`run` within an event loop, with a model that `load` makes. It takes over this process's signals and stdout."""
    server = Server(settings)
    with contextlib.ExitStack() as signals:
        stopping = signals.enter_context(_stop_signal(at_once=server.abandon))
        if settings.is_reloadable:  # else it ends the process, as when its terminal is closed
            signals.enter_context(_hangup_signal(server.reload))
        async with server:
            exit_code = await _serve_until(stopping, server, load, settings)
        _log.info("stopped")
    return exit_code


async def _serve_until(stopping: "asyncio.Future[None]", server: "Server", load: Load, settings: ServeSettings) -> int:
    starting = asyncio.create_task(server.start(load))
    await _first_of(starting, stopping)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return 0
    ticking = starting.result()
    _announce(server.ready)
    _log.info(f"serving {settings.model_name} at {server.url} (docs at {server.url}/docs); Ctrl-C stops")
    await _first_of(ticking, stopping)
    if ticking.done():
        _log.critical("the engine has failed", exc_info=ticking.exception())
        return 1
    _log.info("stopping; a second signal ends at once", **server.unfinished, grace_s=settings.grace)
    await server.drain()
    return 0


class Server:
    """Sockets, model and engine of one server, in this event loop.

    As a context manager it listens from the start: HTTP answers 503 and the JSON socket keeps its clients waiting until
    `start` has returned. Leaving it ends every request and closes everything; `drain` before gives requests time.

    Raises `KeyFileError` and `CertificateError` for files that are none.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._keys = ApiKeys(settings.api_key, settings.api_key_file)
        self._certificate = None if settings.ssl_cert is None else Certificate(settings.ssl_cert, settings.ssl_key)
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
            self._http = self._listen("port", settings.port)
            if settings.jsonl_port is not None:
                self._jsonl = self._listen("jsonl_port", settings.jsonl_port)
            if settings.unix_socket is not None:
                self._unix = UnixListener(settings.unix_socket)
                self._resources.callback(self._unix.close)
            await self._start_http()
        except BaseException:
            await self._resources.aclose()
            raise
        if settings.is_public and not self._keys.are_needed:
            _log.warning("whoever can reach this host may use the server: set --api-key-file", host=settings.host)
        if ANY_ORIGIN in settings.cors_origin and not self._keys.are_needed:
            _log.warning("every web page a browser here opens may use the server: set --cors-origin to those that may")
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
        tracing = tracing_of(os.environ)

        def on_finished(finished: Finished) -> None:
            logs.log_finished(finished)
            if tracing is not None:
                tracing.end(finished)

        engine = EngineLoop(loaded.scheduler, loaded.backend, loaded.tokenizer, on_finished=on_finished)
        service = Service(engine, loaded.tokenizer, loaded.template, self._served(loaded), tracing)
        if tracing is not None:
            self._resources.push_async_callback(_close_in_time, tracing)
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

    def reload(self) -> None:
        """Read the files of keys and of the certificate again, for requests and connections still to come.

        A mistake in one does not keep the other from being read.
        """
        for what, path, files in (
            ("keys", self._settings.api_key_file, self._keys),
            ("certificate", self._settings.ssl_cert, self._certificate),
        ):
            if path is None or files is None:
                continue
            try:
                files.reload()
            except (KeyFileError, CertificateError) as error:
                _log.error("what was set before stays in force", what=what, reason=str(error))
            else:
                _log.info("read again", what=what)

    def abandon(self) -> None:
        """Remove what would outlive the process: it is about to end without leaving this context."""
        if self._unix is not None:
            self._unix.close()

    @property
    def num_unfinished(self) -> int:
        """Requests that were taken in and have not finished."""
        return self._serving.get().engine.num_unfinished

    @property
    def unfinished(self) -> dict[str, int]:
        """The same for the log, with their choices that run and that wait."""
        engine = self._serving.get().engine
        return {"requests": engine.num_unfinished, "running": engine.num_running, "waiting": engine.num_waiting}

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
        scheme = "http" if self._certificate is None else "https"
        host = ANY_ADDRESS.get(self._settings.host, self._settings.host)
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

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

    @property
    def _tls(self) -> dict[str, Any]:
        """How to listen on TCP."""
        if self._certificate is None:
            return {}
        return {"ssl": self._certificate.context, "ssl_handshake_timeout": HANDSHAKE_S}

    def _close_service(self) -> None:
        if self._serving.service is not None:
            self._serving.service.close()

    def _listen(self, option: str, port: int) -> list[socket.socket]:
        sockets = listen_tcp(self._settings.host, port, option)
        for sock in sockets:
            self._resources.callback(sock.close)
        return sockets

    async def _start_http(self) -> None:
        app = build_app(self._serving, self._settings, self._keys)
        runner = Runner(app, ConnectionLimits.of(self._settings), shutdown_timeout=LAST_EVENTS_S)
        await runner.setup()
        self._resources.push_async_callback(runner.cleanup)
        assert runner.server is not None
        for sock in self._http:
            listening = await asyncio.get_running_loop().create_server(
                runner.server, sock=sock, backlog=ACCEPTED_AT_ONCE, **self._tls
            )
            sock.listen(BACKLOG)  # which asyncio has just lowered
            self._resources.callback(listening.close)

    async def _start_jsonl(self, service: Service) -> None:
        jsonl = JsonlServer(service, self._settings, self._keys)
        servers = [
            await asyncio.start_server(jsonl, sock=sock, backlog=ACCEPTED_AT_ONCE, **self._tls) for sock in self._jsonl
        ]
        listening = list(self._jsonl)
        if self._unix is not None:
            unix = self._unix.socket
            servers.append(await asyncio.start_unix_server(jsonl, sock=unix, backlog=ACCEPTED_AT_ONCE))
            listening.append(unix)
        for sock in listening:
            sock.listen(BACKLOG)  # which asyncio has just lowered
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
    if resource.RLIM_INFINITY not in {allowed, possible} and needed > possible:
        _log.warning("too few files may be open for --max-connections: raise ulimit -Hn", needed=needed, may=possible)
        needed = possible
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, possible))


async def _close_in_time(tracing: Tracing) -> None:
    """Let the last spans be sent, if their receiver takes them soon."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_SPANS_S):
            await _in_daemon_thread(tracing.close)


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


@contextlib.contextmanager
def _hangup_signal(reload: Callable[[], None]) -> Iterator[None]:
    """Call `reload` on SIGHUP."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
