"""One request's events on their way to one consumer."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

from scheduler.events import Delta, Event, Finished, Token


class Sink(Protocol):
    """Where the loop puts the events of one request."""

    def put(self, event: Event, /) -> None:
        """Take one event. Never blocks, never raises."""


class _Growing:
    """The deltas of one choice that its consumer has not taken yet: however many come, one goes out."""

    def __init__(self, delta: Delta) -> None:
        self._request_id = delta.request_id
        self._index = delta.index
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self.add(delta)

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._tokens.extend(delta.tokens)

    def merged(self) -> Delta:
        return Delta(self._request_id, self._index, "".join(self._texts), tuple(self._tokens))


class EventStream:
    """An async iterator of one request's events that ends after `Finished`; for one consumer.

    A consumer slower than the model costs one pending delta per choice, no more: newer text is merged into it.
    """

    def __init__(self, request_id: str, abort: Callable[[str], object]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._pending: deque[Event | _Growing] = deque()
        self._growing: dict[int, _Growing] = {}
        self._arrival: asyncio.Future[None] | None = None
        self._is_complete = False

    def put(self, event: Event) -> None:
        """Hand one event over. Never blocks; the loop alone calls it."""
        if isinstance(event, Delta):
            if (growing := self._growing.get(event.index)) is not None:
                growing.add(event)
                return
            growing = self._growing[event.index] = _Growing(event)
            self._pending.append(growing)
        else:
            self._is_complete = isinstance(event, Finished)
            self._pending.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def close(self) -> None:
        """The consumer is gone: abort the request unless it has finished. May be called again."""
        if not self._is_complete:
            self._abort(self.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._pending:
            if self._is_complete:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._take()

    def arrived(self) -> list[Event]:
        """Every event that has come and was not taken yet, without waiting."""
        return [self._take() for _ in range(len(self._pending))]

    def _take(self) -> Event:
        event = self._pending.popleft()
        if isinstance(event, _Growing):
            event = event.merged()
            del self._growing[event.index]
        return event
