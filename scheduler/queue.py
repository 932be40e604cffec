"""Who waits for a slot, in which order, and how many may."""

from bisect import insort_right
from collections.abc import Iterable

from engine.errors import ParamError
from scheduler.request import Request
from scheduler.sequence import Sequence


class WaitingQueue:
    """Choices without a slot: those of lower priority first, then those that came first.

    At most `max_requests` requests wait for their first slot, with `max_tokens` tokens in their prompts together.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def push(self, choices: Iterable[Sequence]) -> None:
        """Let the choices of one request wait, behind everything of its priority."""
        for choice in choices:
            insort_right(self._sequences, choice, key=_priority)

    def pop(self) -> Sequence:
        """The head, which gets a slot."""
        return self._sequences.pop(0)

    def remove(self, sequence: Sequence) -> None:
        """Let `sequence` wait no longer."""
        self._sequences.remove(sequence)

    def place(self, request_id: str) -> int | None:
        """The place of a request among those that wait for their first slot, 1 for the next; None if it does not."""
        for place, sequence in enumerate(self._firsts(), 1):
            if sequence.request.id == request_id:
                return place
        return None

    def refusal(self, num_prompt: int) -> str | None:
        """Why a request with so many prompt tokens cannot wait; None if it can."""
        firsts = self._firsts()
        if len(firsts) >= self._max_requests:
            return f"{_are(len(firsts), 'request')} waiting, the limit is {self._max_requests}"
        num_tokens = sum(sequence.num_prompt for sequence in firsts)
        if num_tokens + num_prompt > self._max_tokens:
            return (
                f"{_are(num_tokens, 'prompt token')} waiting, "
                f"with {num_prompt} more the limit {self._max_tokens} is passed"
            )
        return None

    def check_together(self, requests: Iterable[Request], n_slots: int) -> None:
        """Raise `ParamError` if so many requests at once could not start or wait even on `n_slots` idle slots."""
        num_free, waiting = n_slots, list[Request]()
        for request in requests:
            if num_free > 0:
                num_free -= request.n
            else:
                waiting.append(request)
        beside = f"in the queue beside {_counted(n_slots, 'slot')}"
        if len(waiting) > self._max_requests:
            has = _counted(self._max_requests, "place")
            raise ParamError("prompt", f"prompt needs {_counted(len(waiting), 'place')} {beside}, the queue has {has}")
        num_tokens = sum(len(request.prompt_ids) for request in waiting)
        if num_tokens > self._max_tokens:
            has = f"room for {self._max_tokens}"
            raise ParamError(
                "prompt", f"prompt needs room for {_counted(num_tokens, 'token')} {beside}, the queue has {has}"
            )

    def num_before_room(self, num_prompt: int) -> int:
        """How many slots must become free until a request with so many prompt tokens can wait, or run at once."""
        firsts = self._firsts()
        num_requests, num_tokens = len(firsts), sum(sequence.num_prompt for sequence in firsts)
        for num_gone, sequence in enumerate(self._sequences):
            if num_requests < self._max_requests and num_tokens + num_prompt <= self._max_tokens:
                return num_gone
            if sequence.index == 0:
                num_requests -= 1
                num_tokens -= sequence.num_prompt
        has_room = self._max_requests > 0 and num_prompt <= self._max_tokens
        return len(self._sequences) + (0 if has_room else 1)

    def _firsts(self) -> list[Sequence]:
        """The first choice of every request that has not started."""
        return [sequence for sequence in self._sequences if sequence.index == 0]


def _priority(sequence: Sequence) -> int:
    return sequence.request.priority


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _are(number: int, noun: str) -> str:
    return f"{_counted(number, noun)} {'is' if number == 1 else 'are'}"
