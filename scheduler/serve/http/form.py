"""Events to answers, whole or in chunks: what every form can do, and what the two OpenAI endpoints' forms share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from engine.batch import TokenLogprobs
from scheduler.collected import CollectedChoice
from scheduler.events import ChoiceFinished, Delta, Finished, PromptProgress, PromptScored, Started, Token, Usage
from scheduler.request import Request
from scheduler.serve.call import Call, summed
from scheduler.serve.http.stream_timings import TimingsSoFar
from scheduler.serve.service import Service
from scheduler.serve.wire.generation import Answer
from scheduler.serve.wire.usage import WireMetrics, WireProgress, WireTimings, WireUsage

News = Started | PromptProgress | PromptScored | Delta


class Form(Protocol):
    """How the answer to one call looks on the wire."""

    call: Call
    has_done: bool
    """Whether `[DONE]` ends a stream."""

    def news(self, position: int, event: News) -> Sequence[object]:
        """The chunks that say `event` of the prompt at `position`; none if this client did not ask for it."""

    def ends(self, position: int, end: ChoiceFinished, finished: Sequence[Finished] = ()) -> Sequence[object]:
        """The chunks that end a choice; the last one to end has `finished`, one event per request."""

    def whole(self, choices: Sequence[CollectedChoice], finished: Sequence[Finished]) -> object:
        """The answer in one piece; `choices` in order of their index."""


class AnswerForm(ABC):
    """OpenAI's form of an answer. It remembers what has been sent of each choice of a stream."""

    has_done = True

    def __init__(self, call: Call, service: Service) -> None:
        self.call = call
        self.service = service
        self.common: dict[str, Any] = {
            "id": call.id,
            "created": call.created,
            "model": call.model,
            "system_fingerprint": service.model.fingerprint,
        }
        """The fields that are the same in every chunk."""
        self._begun: set[int] = set()
        self._num_sent_tokens = 0
        self._so_far = TimingsSoFar()
        self._scored: dict[int, tuple[TokenLogprobs | None, ...]] = {}

    def news(self, position: int, event: News) -> list[Answer]:
        """The chunks that say `event` of the prompt at `position`; none if this client did not ask for it."""
        match event:
            case Started():
                self._so_far.on_started(event.queue_s)
                return []
            case PromptProgress():
                chunk = self._progress(position)
                chunk.prompt_progress = WireProgress.of(event)
                return self._with_costs([chunk])
            case PromptScored():
                self._scored[position] = event.logprobs
                return []
            case Delta():
                return self._deltas(position, event)

    def _deltas(self, position: int, delta: Delta) -> list[Answer]:
        self._so_far.on_tokens()
        chunks = self._opening(position, delta.index)
        self._num_sent_tokens += len(delta.tokens)
        wants_tokens = self.call.return_token_ids or self.call.continuous_usage or self._wants_logprobs(position)
        if delta.text or wants_tokens:
            chunks.append(self._delta(position, delta))
        return self._with_costs(chunks)

    def ends(self, position: int, end: ChoiceFinished, finished: Sequence[Finished] = ()) -> list[Answer]:
        """The chunks that end a choice; the last one to end has `finished`, one event per request.

        A stream with `include_usage` ends with a chunk without choices.
        """
        chunks = self._with_costs([*self._opening(position, end.index), self._end(position, end)])
        if finished:
            self._add_times(chunks[-1], finished)
            if self.call.include_usage:
                chunks.append(self._empty_chunk())
                chunks[-1].usage = WireUsage.of(summed(finished)[0])
        return chunks

    def whole(self, choices: Sequence[CollectedChoice], finished: Sequence[Finished]) -> Answer:
        """The answer in one piece; `choices` in order of their index."""
        answer = self._whole(choices, finished)
        answer.usage = WireUsage.of(summed(finished)[0])
        self._add_times(answer, finished)
        return answer

    def _add_times(self, answer: Answer, finished: Sequence[Finished]) -> None:
        usage, timings = summed(finished)
        answer.timings = WireTimings.of(timings, usage)
        answer.metrics = WireMetrics.of(timings, usage, self.call.num_choices)

    def _opening(self, position: int, choice: int) -> list[Answer]:
        """What precedes a choice's first piece, once."""
        index = self.call.index(position, choice)
        if index in self._begun:
            return []
        self._begun.add(index)
        return self._open(position, index)

    def _with_costs(self, chunks: list[Answer]) -> list[Answer]:
        """`chunks` with the tokens and the time so far, where they are asked for."""
        if self.call.timings_per_token:
            timings = self._so_far.wire(Usage(self.call.num_prompt_tokens, self._num_sent_tokens))
            for chunk in chunks:
                chunk.timings = timings
        if self.call.include_usage:
            usage = None
            if self.call.continuous_usage:
                prompt = self.call.num_prompt_tokens
                usage = WireUsage(prompt, self._num_sent_tokens, prompt + self._num_sent_tokens)
            for chunk in chunks:
                chunk.usage = usage
        return chunks

    def _request(self, position: int) -> Request:
        return self.call.requests[position]

    def _wants_logprobs(self, position: int) -> bool:
        return self._request(position).params.logprobs is not None

    def _end_fields(self, position: int, end: ChoiceFinished) -> dict[str, Any]:
        return {
            "finish_reason": end.reason.value,
            "stop_reason": end.stop_reason,
            "seed": self._request(position).params.seed,
        }

    @abstractmethod
    def _open(self, position: int, index: int) -> list[Answer]:
        """The chunks that precede the first piece of the choice with `index`."""

    @abstractmethod
    def _progress(self, position: int) -> Answer:
        """A chunk that says nothing of the prompt's first choice."""

    @abstractmethod
    def _delta(self, position: int, delta: Delta) -> Answer:
        """One piece of one choice."""

    @abstractmethod
    def _end(self, position: int, end: ChoiceFinished) -> Answer:
        """The end of one choice."""

    @abstractmethod
    def _empty_chunk(self) -> Answer:
        """A chunk without choices."""

    @abstractmethod
    def _whole(self, choices: Sequence[CollectedChoice], finished: Sequence[Finished]) -> Answer:
        """The answer in one piece, without its costs."""


def ids_of(tokens: Sequence[Token]) -> list[int]:
    """The ids of `tokens`."""
    return [token.token_id for token in tokens]


def logprobs_of(tokens: Sequence[Token]) -> list[TokenLogprobs]:
    """The log-probabilities of `tokens`, which were asked for."""
    logprobs = []
    for token in tokens:
        assert token.logprobs is not None
        logprobs.append(token.logprobs)
    return logprobs
