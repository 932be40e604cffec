"""The scheduler without a model, in a time of its own: what a policy does to a load, in a moment instead of hours."""

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from engine.batch import Result, Sampled, Scored, TokenLogprobs
from engine.errors import QueueFullError
from scheduler.batch import Batch, Work
from scheduler.core import Scheduler
from scheduler.events import Finished
from scheduler.request import Request

TOKEN_ID = 0
"""What the model that is not there says, always."""


class Arrival(msgspec.Struct, frozen=True):
    """A request that comes at `t` seconds."""

    t: float
    request: Request


class Outcome(msgspec.Struct, frozen=True):
    """How a simulation went: what finished, in that order, the ids the queue had no room for, and when it was over."""

    finished: tuple[Finished, ...]
    refused: tuple[str, ...]
    t_end: float


def simulate(scheduler: Scheduler, arrivals: Iterable[Arrival], cost: Callable[[Batch], float]) -> Outcome:
    """The outcome of `arrivals` on a model whose forward of a batch takes `cost(batch)` seconds, and nothing else any.

    Modifies `scheduler`: its metrics are those of the simulation. Every answer is as long as its `max_tokens` and its
    slot allow if `TOKEN_ID` is neither among the scheduler's `eos_ids` nor a stop token. Raises what
    `Scheduler.submit` raises, but for `QueueFullError`.
    """
    coming = deque(sorted(arrivals, key=lambda arrival: arrival.t))
    finished: list[Finished] = []
    refused: list[str] = []

    def submit_until(t: float) -> None:
        while coming and coming[0].t <= t:
            arrival = coming.popleft()
            try:
                scheduler.submit(arrival.request, arrival.t)
            except QueueFullError:
                refused.append(arrival.request.id)

    t = 0.0
    while True:
        submit_until(t)
        batch = scheduler.schedule()
        if batch is None:
            if not coming:
                return Outcome(tuple(finished), tuple(refused), t)
            t = coming[0].t
            continue
        seconds = cost(batch)
        submit_until(t + seconds)  # who comes while the forward runs is in the queue when it is over
        t += seconds
        scheduler.metrics.on_forward(seconds)
        events = scheduler.update(batch, [_result(work) for work in batch.work], t)
        finished += [event for event in events if isinstance(event, Finished)]


def _result(work: Work) -> Result:
    if work.samples:
        return Sampled(TOKEN_ID)
    if work.chunk.n_logits:
        return Scored((TokenLogprobs(TOKEN_ID, 0.0, 1),) * work.chunk.n_logits)
    return None
