"""The engine for programs that use asyncio."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from engine.params import SamplingParams
from scheduler.events import Event, Finished
from scheduler.inprocess.completion import Completion, completion_of, raise_if_failed
from scheduler.inprocess.running import DEFAULT_PARAMS, InProcess, Messages, Prompt
from scheduler.request import Request
from scheduler.stream import EventStream


class Stream:
    """The events of one request, for `async for`; `request` is what was asked, with the seed that was drawn for it.

    `Finished` is the last event. If the request failed, iterating then raises `GenerationError`, or the `LockstepError`
    it failed of. Unless it has finished, `close` or leaving its `async with` block aborts the request at once, and
    letting go of it, as `break` does where nothing else refers to it, the next time the event loop is given the word.
    """

    def __init__(self, request: Request, events: EventStream, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self._events = events
        self._loop = loop
        self._finished: Finished | None = None

    def close(self) -> None:
        """Abort the request, unless it has finished. May be called again."""
        self._events.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._finished is not None:
            raise_if_failed(self._finished)
            raise StopAsyncIteration
        event = await anext(self._events)
        if isinstance(event, Finished):
            self._finished = event
        return event

    def __del__(self) -> None:
        # A garbage collection may run anywhere, in another thread or in the midst of a tick.
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._events.close)


class Engine(InProcess):
    """A model in this process, for any number of requests at once, which advance together.

    `async with Engine("model.gguf") as engine:` loads it; leaving the block aborts what is unfinished and ends
    everything. Entering raises `ModelFileError` for a file that is no model that can be run, `ParamError` for a context
    or kernels that cannot be, and `CacheError` for slots or a kv_dtype that cannot.
    """

    async def __aenter__(self) -> Self:
        self._resources = contextlib.AsyncExitStack()
        self._running = await self._resources.enter_async_context(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running = None
        await self._resources.aclose()

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        params: SamplingParams = DEFAULT_PARAMS,
        n: int = 1,
    ) -> Stream:
        """The events of `n` continuations of `prompt` (text or token ids), or of `n` answers to `messages`.

        The request has begun to wait or run when this returns. Raises `ParamError`, `ContextLengthError` for a prompt
        that leaves no room for an answer, `TemplateError` for messages the model's template refuses, and
        `DrainingError` outside the engine's block.
        """
        running = self._now_running
        loop = asyncio.get_running_loop()
        request = running.request(prompt, messages, params, n)
        return Stream(request, running.loop.submit(request), loop)

    async def complete(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        params: SamplingParams = DEFAULT_PARAMS,
        n: int = 1,
    ) -> Completion:
        """What `generate` gives, as a whole. Cancelling this aborts the request at once.

        Raises what `generate` raises, and what iterating raises if the request fails.
        """
        async with self.generate(prompt, messages=messages, params=params, n=n) as stream:
            return completion_of(stream.request, [event async for event in stream])
