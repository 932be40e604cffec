"""Who waits for a slot, in which order, and how many may."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.errors import ParamError
from scheduler.metrics import QueueLimit
from scheduler.request import Request
from scheduler.sequence import Sequence

Waiting = deque[Sequence]
"""The choices of one request that have no slot yet, in order; never empty."""


class Refusal(NamedTuple):
    """Which limit a request would pass, and what to tell its client."""

    limit: QueueLimit
    message: str


class WaitingQueue:
    """Choices without a slot: those of lower priority first, then those that came first.

    At most `max_requests` requests wait for their first slot, with `max_tokens` tokens in their prompts together. What
    a choice costs here does not grow with the number of choices that wait.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._levels: dict[int, OrderedDict[str, Waiting]] = {}
        """By priority, the requests in order of arrival. An OrderedDict loses its first entry in constant time."""
        self._num_choices = 0
        self._num_firsts = 0
        self._num_tokens = 0
        self._places: dict[str, int] | None = None
        """Every place, counted when one is asked for, until the next change."""

    def __len__(self) -> int:
        return self._num_choices

    def push(self, choices: Iterable[Sequence]) -> None:
        """Let the choices of one request wait, behind everything of its priority."""
        waiting = Waiting(choices)
        request = waiting[0].request
        self._levels.setdefault(request.priority, OrderedDict())[request.id] = waiting
        self._num_choices += len(waiting)
        self._count_first(waiting[0], 1)

    def pop(self) -> Sequence:
        """The head, which gets a slot."""
        priority = min(self._levels)
        request_id, waiting = next(iter(self._levels[priority].items()))
        sequence = waiting.popleft()
        self._num_choices -= 1
        self._count_first(sequence, -1)
        if not waiting:
            self._forget(priority, request_id)
        return sequence

    def remove(self, request: Request) -> None:
        """Let no choice of `request` wait any longer, if one does."""
        level = self._levels.get(request.priority)
        if level is not None and (waiting := level.get(request.id)) is not None:
            self._num_choices -= len(waiting)
            self._count_first(waiting[0], -1)
            self._forget(request.priority, request.id)

    def place(self, request_id: str) -> int | None:
        """The place of a request among those that wait for their first slot, 1 for the next; None if it does not."""
        if self._places is None:
            firsts = (waiting[0].request.id for waiting in self._in_order() if waiting[0].index == 0)
            self._places = {first_id: place for place, first_id in enumerate(firsts, 1)}
        return self._places.get(request_id)

    def refusal(self, num_prompt: int) -> Refusal | None:
        """Why a request with so many prompt tokens cannot wait; None if it can."""
        if self._num_firsts >= self._max_requests:
            message = f"{_are(self._num_firsts, 'request')} waiting, the limit is {self._max_requests}"
            return Refusal("requests", message)
        if self._num_tokens + num_prompt > self._max_tokens:
            are_waiting = f"{_are(self._num_tokens, 'prompt token')} waiting"
            return Refusal("tokens", f"{are_waiting}, with {num_prompt} more the limit {self._max_tokens} is passed")
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
        num_requests, num_tokens, num_gone = self._num_firsts, self._num_tokens, 0
        if num_requests < self._max_requests and num_tokens + num_prompt <= self._max_tokens:
            return 0
        for waiting in self._in_order():
            if waiting[0].index == 0:
                num_requests -= 1
                num_tokens -= waiting[0].num_prompt
                if num_requests < self._max_requests and num_tokens + num_prompt <= self._max_tokens:
                    return num_gone + 1
            num_gone += len(waiting)
        # It can never wait, and needs a slot that is free.
        return num_gone + 1

    def _in_order(self) -> Iterator[Waiting]:
        """Every request's choices, the next to start first."""
        for priority in sorted(self._levels):
            yield from self._levels[priority].values()

    def _count_first(self, sequence: Sequence, change: int) -> None:
        """Account for one request more or less that waits for its first slot, if `sequence` is its first choice."""
        self._places = None
        if sequence.index == 0:
            self._num_firsts += change
            self._num_tokens += change * sequence.num_prompt

    def _forget(self, priority: int, request_id: str) -> None:
        level = self._levels[priority]
        del level[request_id]
        if not level:
            del self._levels[priority]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _are(number: int, noun: str) -> str:
    return f"{_counted(number, noun)} {'is' if number == 1 else 'are'}"
