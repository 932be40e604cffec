"""The one task that ticks: schedule, forward, update."""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from engine.batch import Result, RowError
from engine.detokenizer import TokenBytes
from engine.errors import DrainingError
from scheduler.batch import Backend, Batch
from scheduler.core import Scheduler
from scheduler.events import Event, Finished
from scheduler.metrics import Metrics
from scheduler.output import Output, TextOutput
from scheduler.request import FinishReason, Request
from scheduler.request_view import RequestView
from scheduler.slots import SlotView
from scheduler.stream import EventStream, Sink


class EngineLoop:
    """Runs a scheduler against a backend and hands every request's events to its stream.

    The forward runs in a thread of its own, everything else in the event loop's thread. `on_finished` is called
    after every request's end, whether or not anyone still reads its stream: for the log. What it raises goes to the
    event loop's exception handler and ends nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend,
        tokenizer: TokenBytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_finished: Callable[[Finished], None] = lambda _finished: None,
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._open_output: Callable[[Request, int], Output] = partial(TextOutput, tokenizer=tokenizer)
        self._clock = clock
        self._on_finished = on_finished
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self._sinks: dict[str, Sink] = {}
        self._wake = asyncio.Event()
        self._all_finished = asyncio.Event()
        self._all_finished.set()
        self._ended = asyncio.Event()
        self._is_draining = False
        self._is_stopping = False
        self._is_started = False

    @property
    def metrics(self) -> Metrics:
        """The scheduler's counters."""
        return self._scheduler.metrics

    @property
    def n_slots(self) -> int:
        """How many choices run at once."""
        return self._scheduler.n_slots

    @property
    def max_len(self) -> int:
        """Positions of a slot."""
        return self._scheduler.max_len

    @property
    def num_running(self) -> int:
        """Choices that hold a slot."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Choices that wait for a slot."""
        return self._scheduler.num_waiting

    @property
    def num_unfinished(self) -> int:
        """Requests that were taken in and have not finished."""
        return len(self._sinks)

    @property
    def cache_usage(self) -> float:
        """The part of all slots' positions that is filled, 0 to 1."""
        return self._scheduler.cache_usage

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is taken in: shutting down, or the engine has failed."""
        return self._is_draining

    def slots(self) -> list[SlotView]:
        """What every slot is doing."""
        return self._scheduler.slots()

    def view(self, request_id: str) -> RequestView | None:
        """Where an unfinished request is; None if there is no such."""
        return self._scheduler.view(request_id)

    def check_together(self, requests: Iterable[Request]) -> None:
        """Raise `ParamError` if requests that come at once could not all be taken in even if there were no others."""
        self._scheduler.check_together(requests)

    def submit(self, request: Request) -> EventStream:
        """The stream of a request's events; it has begun to wait or run.

        Raises `DrainingError`, or what `Scheduler.submit` raises.
        """
        stream = EventStream(request.id, self.abort)
        self.submit_to(request, stream)
        return stream

    def submit_to(self, request: Request, sink: Sink) -> None:
        """Let a request begin to wait or run, its events going to `sink`; raises what `submit` raises."""
        if self._is_draining:
            raise DrainingError("the server is shutting down and takes no new requests")
        events = self._scheduler.submit(request, self._clock(), self._open_output)
        self._sinks[request.id] = sink
        self._all_finished.clear()
        self._deliver(events)
        self._wake.set()

    def abort(self, request_id: str) -> bool:
        """Cancel a request; its slots are free at once. False if there is none such unfinished."""
        if request_id not in self._sinks:
            return False
        self._deliver(self._scheduler.finish(request_id, FinishReason.ABORT, self._clock()))
        self._wake.set()
        return True

    def drain(self) -> None:
        """Take in nothing new; what has been taken in goes on."""
        self._is_draining = True

    async def join(self) -> None:
        """Wait until every request has finished."""
        await self._all_finished.wait()

    async def stop(self) -> None:
        """Abort what is unfinished and wait for `run` to return, after the forward that is in flight."""
        self.drain()
        for request_id in self._scheduler.unfinished_ids():
            self.abort(request_id)
        self._is_stopping = True
        self._wake.set()
        if self._is_started:
            await self._ended.wait()
        self._executor.shutdown(wait=False)

    async def run(self) -> None:
        """Tick while there is work and sleep while there is none, until `stop`.

        Should the scheduler itself fail, every unfinished request ends with an error before the exception goes on.
        """
        self._is_started = True
        try:
            while not self._is_stopping:
                batch = self._scheduler.schedule()
                if batch is None:
                    await self._wake.wait()
                    self._wake.clear()
                    continue
                results = await self._forward(batch)
                self._deliver(self._scheduler.update(batch, results, self._clock()))
        finally:
            self.drain()
            error = RowError("the engine has stopped")
            for request_id in self._scheduler.unfinished_ids():
                self._deliver(self._scheduler.finish(request_id, FinishReason.ERROR, self._clock(), error=error))
            self._ended.set()

    async def _forward(self, batch: Batch) -> list[Result]:
        """The backend's results; if it raises, an error for every row of the batch, and the loop lives on."""
        t_start = self._clock()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._backend.run, batch)
        except Exception as fault:  # noqa: BLE001 - it ends this batch's requests, not the server
            return [RowError("the server failed while computing this request", fault)] * len(batch.work)
        finally:
            self.metrics.on_forward(self._clock() - t_start)

    def _deliver(self, events: Iterable[Event]) -> None:
        """Each event to its request's sink."""
        for event in events:
            self._sinks[event.request_id].put(event)
            if isinstance(event, Finished):
                del self._sinks[event.request_id]
                asyncio.get_running_loop().call_soon(self._on_finished, event)
        if not self._sinks:
            self._all_finished.set()
