"""Events to answers, whole or in chunks: what the two endpoints' forms share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.batch import TokenLogprobs
from scheduler.choice import ChoiceSoFar
from scheduler.events import ChoiceFinished, Delta, Finished, Token
from scheduler.request import Request
from scheduler.serve.call import Call, summed
from scheduler.serve.service import Service
from scheduler.serve.wire.generation import Answer
from scheduler.serve.wire.usage import WireTimings, WireUsage


class AnswerForm(ABC):
    """How the answer to one call looks on the wire. It remembers what has been sent of each choice of a stream."""

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

    def deltas(self, position: int, delta: Delta) -> list[Answer]:
        """The chunks that say `delta`; none if it has nothing this client asked for."""
        chunks = self._opening(position, delta.index)
        self._num_sent_tokens += len(delta.tokens)
        wants_tokens = self.call.return_token_ids or self.call.continuous_usage or self._wants_logprobs(position)
        if delta.text or wants_tokens:
            chunks.append(self._delta(position, delta))
        return self._with_usage(chunks)

    def ends(self, position: int, end: ChoiceFinished, finished: Sequence[Finished] = ()) -> list[Answer]:
        """The chunks that end a choice; the last one to end has `finished`, one event per request."""
        chunks = [*self._opening(position, end.index), self._end(position, end)]
        if finished:
            usage, timings = summed(finished)
            chunks[-1].timings = WireTimings.of(timings, usage)
        return self._with_usage(chunks)

    def usage(self, finished: Sequence[Finished]) -> Answer:
        """The chunk without choices that a stream with `include_usage` ends with."""
        usage, _ = summed(finished)
        chunk = self._empty_chunk()
        chunk.usage = WireUsage.of(usage)
        return chunk

    def whole(self, choices: Sequence[ChoiceSoFar], finished: Sequence[Finished]) -> Answer:
        """The answer in one piece; `choices` in order of their index."""
        answer = self._whole(choices, finished)
        usage, timings = summed(finished)
        answer.usage = WireUsage.of(usage)
        answer.timings = WireTimings.of(timings, usage)
        return answer

    def _opening(self, position: int, choice: int) -> list[Answer]:
        """What precedes a choice's first piece, once."""
        index = self.call.index(position, choice)
        if index in self._begun:
            return []
        self._begun.add(index)
        return self._open(position, index)

    def _with_usage(self, chunks: list[Answer]) -> list[Answer]:
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
    def _delta(self, position: int, delta: Delta) -> Answer:
        """One piece of one choice."""

    @abstractmethod
    def _end(self, position: int, end: ChoiceFinished) -> Answer:
        """The end of one choice."""

    @abstractmethod
    def _empty_chunk(self) -> Answer:
        """A chunk without choices."""

    @abstractmethod
    def _whole(self, choices: Sequence[ChoiceSoFar], finished: Sequence[Finished]) -> Answer:
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
