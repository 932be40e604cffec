"""The scheduler: which request gets which slot, what the next tick runs, and when a choice is over.

Sans-io: no clock, no threads, no arrays. Instants and token ids come in as arguments, events go out as return values.
A caller alternates `schedule` and `update`; `submit` and `finish` may come at any moment, also between the two.
"""

import sys
from collections.abc import Callable, Iterable

from engine.batch import Result, RowError, Sampled, Scored
from engine.errors import ContextLengthError, ParamError, QueueFullError
from scheduler.batch import Batch, Work
from scheduler.ending import Ending, ending_by_id, finished, hides_its_token
from scheduler.events import ChoiceFinished, Event, PromptProgress, PromptScored, Started
from scheduler.metrics import Metrics
from scheduler.output import Output, TokensOnly
from scheduler.pace import Pace
from scheduler.plan import next_plan, next_to_prefill
from scheduler.queue import WaitingQueue
from scheduler.request import FinishReason, Request
from scheduler.request_view import RequestView, request_view
from scheduler.sequence import Sequence
from scheduler.slots import SlotPool, SlotView


class Scheduler:
    """By priority, then first come, first served, over a fixed pool of slots.

    `n_slots` sequences run at once, each of at most `max_len` positions; a prefill tick computes at most
    `prefill_chunk` tokens; at most `max_queue` requests, with `max_queue_tokens` tokens in their prompts together, wait
    for their first slot; `eos_ids` end a choice unless it ignores them.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        max_len: int,
        prefill_chunk: int,
        max_queue: int,
        max_queue_tokens: int = sys.maxsize,
        eos_ids: frozenset[int],
    ) -> None:
        self.max_len = max_len
        self.metrics = Metrics(max_len)
        self._prefill_chunk = prefill_chunk
        self._eos_ids = eos_ids
        self._pool = SlotPool(n_slots)
        self._waiting = WaitingQueue(max_requests=max_queue, max_tokens=max_queue_tokens)
        self._pace = Pace(n_slots)
        self._running: list[Sequence] = []
        """Every sequence that holds a slot, in order of admission."""
        self._requests: dict[str, tuple[Sequence, ...]] = {}
        """The choices of every unfinished request."""
        self._num_admitted = 0
        self._in_flight: Batch | None = None
        self._after_prefill = False

    @property
    def n_slots(self) -> int:
        """How many choices run at once."""
        return self._pool.n_slots

    @property
    def num_running(self) -> int:
        """Choices that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Choices that wait for a slot."""
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests whose `Finished` has not come yet."""
        return len(self._requests)

    @property
    def cache_usage(self) -> float:
        """The part of all slots' positions that is filled, 0 to 1."""
        return sum(sequence.num_computed for sequence in self._running) / (self._pool.n_slots * self.max_len)

    def slots(self) -> list[SlotView]:
        """What every slot is doing, in slot order."""
        views = [SlotView(slot) for slot in range(self._pool.n_slots)]
        for sequence in self._running:
            assert sequence.slot is not None
            views[sequence.slot] = SlotView(
                slot=sequence.slot,
                state="prefilling" if sequence.num_computed < sequence.num_prompt else "decoding",
                request_id=sequence.request.id,
                index=sequence.index,
                number=sequence.number,
                params=sequence.request.params,
                limit=sequence.limit,
                num_prompt=sequence.num_prompt,
                num_computed=sequence.num_computed,
                num_output=len(sequence.output_ids),
            )
        return views

    def view(self, request_id: str) -> RequestView | None:
        """Where an unfinished request is; None if there is no such."""
        choices = self._requests.get(request_id)
        if choices is None:
            return None
        position = self._waiting.place(request_id)
        prefilling = next_to_prefill(self._running, self._prefill_chunk)
        return request_view(choices, position=position, prefilling=prefilling)

    def unfinished_ids(self) -> list[str]:
        """The ids of all unfinished requests, oldest first."""
        return list(self._requests)

    def check_together(self, requests: Iterable[Request]) -> None:
        """Raise `ParamError` if requests that come at once could not all be taken in even if there were no others."""
        self._waiting.check_together(requests, self.n_slots)

    def submit(
        self, request: Request, now: float, open_output: Callable[[Request, int], Output] = TokensOnly
    ) -> list[Event]:
        """Take `request` in, and let it start if slots are free. `open_output` makes each choice's way out.

        Raises `ContextLengthError` for a prompt that fills the context, `QueueFullError`, and `ParamError` for an
        empty prompt, n < 1, the id of an unfinished request or parameters that leave no token to choose. Nothing has
        changed then.
        """
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0:
            raise ParamError("prompt", "prompt must have at least one token")
        if request.n < 1:
            raise ParamError("n", f"n must be >= 1, got {request.n}")
        request.params.check_leaves_a_token(self._eos_ids)
        if num_prompt >= self.max_len:
            raise ContextLengthError(num_prompt, self.max_len)
        if request.id in self._requests:
            raise ParamError("request_id", f"request_id {request.id!r} is already running")
        if not self._pool.num_free and (refusal := self._waiting.refusal(num_prompt)):
            self.metrics.on_refused(refusal.limit)
            raise QueueFullError(refusal.message, self._pace.seconds_until(self._waiting.num_before_room(num_prompt)))

        limit = self.max_len - num_prompt
        if request.params.max_tokens is not None:
            limit = min(limit, request.params.max_tokens)
        choices = tuple(
            Sequence(request, index, limit, t_arrival=now, open_output=open_output) for index in range(request.n)
        )
        self._requests[request.id] = choices
        self._waiting.push(choices)
        self.metrics.on_submitted(request)
        return self._admit(now)

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        now: float,
        *,
        error: RowError | None = None,
    ) -> list[Event]:
        """End a request from outside; its slots are free at once, even in mid-flight.

        Does nothing if it has ended already, or never was.
        """
        events: list[Event] = []
        for sequence in self._requests.get(request_id, ()):
            events += self._end(sequence, Ending(reason), now, error)
        return events + self._admit(now)

    def schedule(self) -> Batch | None:
        """What the next tick runs; None if there is nothing to do. Its results must come back through `update`."""
        assert self._in_flight is None, "schedule() before the last batch's update()"
        plan = next_plan(self._running, prefill_chunk=self._prefill_chunk, after_prefill=self._after_prefill)
        if plan is None:
            return None
        self._after_prefill = plan.kind == "prefill"
        self._in_flight = plan.batch
        self.metrics.on_scheduled(plan.kind, plan.batch.num_tokens, len(self._running))
        return plan.batch

    def update(self, batch: Batch, results: list[Result], now: float) -> list[Event]:
        """Account for a batch that has run: `results` has one entry for each of `batch.work`, in order.

        What belongs to a sequence that has ended meanwhile is ignored, whoever has its slot now.
        """
        assert batch is self._in_flight, "update() with a batch that schedule() did not just return"
        self._in_flight = None
        events: list[Event] = []
        for work, result in zip(batch.work, results, strict=True):
            if not work.sequence.is_finished:
                events += self._advance(work, result, now)
        self.metrics.on_updated()
        return events + self._admit(now)

    def _admit(self, now: float) -> list[Event]:
        """Give free slots to the head of the queue."""
        events: list[Event] = []
        while self._waiting and self._pool.num_free:
            sequence = self._waiting.pop()
            sequence.slot = self._pool.acquire()
            sequence.output = sequence.open_output(sequence.request, sequence.index)
            sequence.t_admitted = now
            self._num_admitted += 1
            sequence.number = self._num_admitted
            self._running.append(sequence)
            if sequence.index == 0:
                events.append(Started(sequence.request.id, now - sequence.t_arrival))
        return events

    def _advance(self, work: Work, result: Result, now: float) -> list[Event]:
        """What one chunk's result means for its sequence."""
        sequence = work.sequence
        sequence.num_computed = work.chunk.start + len(work.chunk.token_ids)
        if sequence.index == 0 and work.chunk.start < sequence.num_prompt:
            self.metrics.prompt_tokens += len(work.chunk.token_ids)
        match result:
            case RowError():
                return self._fail(sequence, result, now)
            case Scored(logprobs):
                sequence.prompt_logprobs += logprobs
        events = self._prompt_news(work, now)
        if isinstance(result, Sampled):
            events += self._append(sequence, result, now)
        elif sequence.limit == 0 and sequence.num_computed == sequence.num_prompt:
            # The prompt is all there is to compute, and the other choices would compute it again.
            for choice in self._requests[sequence.request.id]:
                events += self._end(choice, Ending(FinishReason.LENGTH), now)
        return events

    def _prompt_news(self, work: Work, now: float) -> list[Event]:
        """What is told of a prompt to who asked for it, when a chunk of it has been computed."""
        sequence, request = work.sequence, work.sequence.request
        events: list[Event] = []
        if sequence.index > 0 or work.chunk.start >= sequence.num_prompt:
            return events
        if request.reports_progress:
            assert sequence.t_admitted is not None
            elapsed_s = now - sequence.t_admitted
            events.append(PromptProgress(request.id, sequence.num_prompt, sequence.num_computed, elapsed_s))
        if sequence.is_scored and sequence.num_computed == sequence.num_prompt:
            events.append(PromptScored(request.id, (None, *sequence.prompt_logprobs)))
        return events

    def _append(self, sequence: Sequence, sampled: Sampled, now: float) -> list[Event]:
        """One more token: what it releases, and the end of the choice if this is it."""
        sequence.output_ids.append(sampled.token_id)
        if sequence.t_last_token is None:
            self._note_first_token(sequence, now)
        else:
            self.metrics.on_token(now - sequence.t_last_token)
        sequence.t_last_token = now

        ending = ending_by_id(sequence, self._eos_ids)
        include_stop = sequence.request.params.include_stop_str_in_output
        hidden = ending is not None and hides_its_token(ending, include_stop=include_stop)

        assert sequence.output is not None
        released = sequence.output.push(sampled, hidden=hidden)
        if isinstance(released, RowError):
            return self._fail(sequence, released, now)
        events: list[Event] = [] if released is None else [released]
        if ending is None and sequence.output.matched is not None:
            ending = Ending(FinishReason.STOP, sequence.output.matched)
        if ending is None and len(sequence.output_ids) >= sequence.limit:
            ending = Ending(FinishReason.LENGTH)
        if ending is not None:
            events += self._end(sequence, ending, now)
        return events

    def _note_first_token(self, sequence: Sequence, now: float) -> None:
        self.metrics.on_token(None)
        if all(choice.t_first_token is None for choice in self._requests[sequence.request.id]):
            self.metrics.on_first_token(now - sequence.t_arrival)
        sequence.t_first_token = now

    def _fail(self, sequence: Sequence, error: RowError, now: float) -> list[Event]:
        """End the whole request of `sequence`, and no other, with an error."""
        events: list[Event] = []
        for sibling in self._requests[sequence.request.id]:
            events += self._end(sibling, Ending(FinishReason.ERROR), now, error)
        return events

    def _end(self, sequence: Sequence, ending: Ending, now: float, error: RowError | None = None) -> list[Event]:
        """End one choice and free its slot; the last one to end ends the request."""
        if sequence.is_finished:
            return []
        events: list[Event] = []
        if ending.reason is not FinishReason.ERROR and sequence.output is not None:
            rest = sequence.output.flush()
            if isinstance(rest, RowError):
                return self._fail(sequence, rest, now)
            if rest is not None:
                events.append(rest)
            if ending.reason is FinishReason.LENGTH and sequence.output.matched is not None:
                ending = Ending(FinishReason.STOP, sequence.output.matched)

        if sequence.is_scored and sequence.num_computed < sequence.num_prompt:
            events.append(PromptScored(sequence.request.id, (None, *sequence.prompt_logprobs)))
        sequence.finish_reason = ending.reason
        if sequence.slot is None:
            self._waiting.remove(sequence.request)
        else:
            self._running.remove(sequence)
            self._pool.release(sequence.slot)
            sequence.slot = None
            assert sequence.t_admitted is not None
            self._pace.on_release(now - sequence.t_admitted)
        self.metrics.on_choice_finished(sequence)
        request = sequence.request
        events.append(
            ChoiceFinished(request.id, sequence.index, ending.reason, ending.stop_reason, len(sequence.output_ids))
        )
        choices = self._requests[request.id]
        if all(choice.is_finished for choice in reversed(choices)):  # the last ones start last, and mostly end last
            del self._requests[request.id]
            event = finished(choices, now, error)
            self.metrics.on_finished(event, choices)
            events.append(event)
        return events
