"""The engine for programs without asyncio, and for their threads."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar

from engine.errors import DrainingError
from engine.params import SamplingParams
from scheduler.events import Event, Finished
from scheduler.inprocess.completion import Completion, completion_of, raise_if_failed
from scheduler.inprocess.running import DEFAULT_PARAMS, NOT_RUNNING, InProcess, Messages, Prompt, Running
from scheduler.loop import EngineLoop
from scheduler.request import Request

T = TypeVar("T")


class BlockingStream:
    """The events of one request, for `for` in one thread; `request` is what was asked, with the seed drawn for it.

    `Finished` is the last event. If the request failed, iterating then raises `GenerationError`, or the `LockstepError`
    it failed of. `close`, leaving its `with` block, or letting go of it (as `break` does where nothing else refers to
    it) aborts the request unless it has finished.
    """

    def __init__(self, request: Request, events: SimpleQueue[Event], abort: Callable[[], None]) -> None:
        self.request = request
        self._events = events
        self._abort = abort
        self._finished: Finished | None = None

    def close(self) -> None:
        """Have the request aborted, unless it has finished; its `Finished` comes then. May be called again."""
        if self._finished is None:
            self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._finished is not None:
            raise_if_failed(self._finished)
            raise StopIteration
        event = self._events.get()
        if isinstance(event, Finished):
            self._finished = event
        return event

    def __del__(self) -> None:
        self.close()


class BlockingEngine(InProcess):
    """A model in this process, run by an event loop in a thread of its own; any number of threads may use it at once.

    `with BlockingEngine("model.gguf") as engine:` loads it; leaving the block aborts what is unfinished, in all
    threads, and ends everything. Entering raises what entering an `Engine` raises.
    """

    def __enter__(self) -> Self:
        # Reentrant: a garbage collection within it may let go of a stream.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: Future[None] = Future()
        self._closed: Future[None] = Future()
        opened: Future[tuple[asyncio.AbstractEventLoop, Running]] = Future()
        self._thread = threading.Thread(target=self._live, args=(opened,), name="engine", daemon=True)
        self._thread.start()
        try:
            self._loop, self._running = opened.result()
        except BaseException:
            self._closing.set_result(None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._loop = self._running = None
        self._closing.set_result(None)
        self._thread.join()
        self._closed.result()

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        params: SamplingParams = DEFAULT_PARAMS,
        n: int = 1,
    ) -> BlockingStream:
        """The events of `n` continuations of `prompt` (text or token ids), or of `n` answers to `messages`.

        The request has begun to wait or run when this returns. Raises `ParamError`, `ContextLengthError` for a prompt
        that leaves no room for an answer, `TemplateError` for messages the model's template refuses, and
        `DrainingError` outside the engine's block.
        """
        running = self._now_running
        request = running.request(prompt, messages, params, n)
        events: SimpleQueue[Event] = SimpleQueue()
        stream = BlockingStream(request, events, lambda: self._abort(running.loop, request.id))
        self._in_loop(lambda: running.loop.submit_to(request, events)).result()
        return stream

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        params: SamplingParams = DEFAULT_PARAMS,
        n: int = 1,
    ) -> Completion:
        """What `generate` gives, as a whole.

        Raises what `generate` raises, and what iterating raises if the request fails.
        """
        with self.generate(prompt, messages=messages, params=params, n=n) as stream:
            return completion_of(stream.request, stream)

    def _live(self, opened: "Future[tuple[asyncio.AbstractEventLoop, Running]]") -> None:
        """The life of the loop's thread."""
        try:
            asyncio.run(self._serve(opened))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            (self._closed if opened.done() else opened).set_exception(error)
        else:
            self._closed.set_result(None)

    async def _serve(self, opened: "Future[tuple[asyncio.AbstractEventLoop, Running]]") -> None:
        async with self._run() as running:
            opened.set_result((asyncio.get_running_loop(), running))
            await asyncio.wrap_future(self._closing)

    def _in_loop(self, call: Callable[[], T]) -> Future[T]:
        """What `call` returns or raises in the loop's thread. Raises `DrainingError` outside the engine's block."""
        outcome: Future[T] = Future()

        def settle() -> None:
            try:
                outcome.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for it
                outcome.set_exception(error)

        with self._lock:
            if self._loop is None:
                raise DrainingError(NOT_RUNNING)
            self._loop.call_soon_threadsafe(settle)
        return outcome

    def _abort(self, loop: EngineLoop, request_id: str) -> None:
        with contextlib.suppress(DrainingError):
            self._in_loop(lambda: loop.abort(request_id))
