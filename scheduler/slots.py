"""Which rows of the KV cache are taken: a fixed pool, and a view of it for people."""

import heapq
from typing import Literal

import msgspec

from engine.params import SamplingParams


class SlotPool:
    """Slots 0..n_slots-1; the lowest free one is handed out first, so that equal histories give equal batches."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._free = list(range(n_slots))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that `acquire` can still hand out."""
        return len(self._free)

    def acquire(self) -> int:
        """The lowest free slot. Asserts that there is one."""
        assert self._free, "acquire() without a free slot"
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give back a slot. Asserts that it was taken."""
        assert slot in self._taken, f"slot {slot} released twice"
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)


class SlotView(msgspec.Struct, frozen=True):
    """What one slot is doing: no text, no token ids, but for what `params` has of them.

    `number` counts the choices that have got a slot, this one included; `limit` is how many tokens this one may have.
    """

    slot: int
    state: Literal["idle", "prefilling", "decoding"] = "idle"
    request_id: str | None = None
    index: int | None = None
    number: int | None = None
    params: SamplingParams | None = None
    limit: int = 0
    num_prompt: int = 0
    num_computed: int = 0
    num_output: int = 0
