"""One tick's work: the engine's chunks, each with the sequence it belongs to, and the face of whatever runs it."""

from typing import Protocol

import msgspec

from engine.batch import Chunk, Copy, Result
from scheduler.sequence import Sequence


class Work(msgspec.Struct, frozen=True):
    """One chunk and whose it is. `samples` is true when the chunk's last logits choose the sequence's next token."""

    sequence: Sequence
    chunk: Chunk
    samples: bool


class Batch(msgspec.Struct, frozen=True):
    """What `Scheduler.schedule` hands to the backend: copies first, then one ragged forward."""

    work: tuple[Work, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The engine's part of the work, in order."""
        return tuple(w.chunk for w in self.work)

    @property
    def num_tokens(self) -> int:
        """Rows of the forward."""
        return sum(len(w.chunk.token_ids) for w in self.work)


class Backend(Protocol):
    """Runs batches, one at a time, in whatever thread the loop chooses."""

    def run(self, batch: Batch) -> list[Result]:
        """Copy, then compute: one result for each of `batch.work`, in order.

        A failure of one row is a `RowError` in its place; an exception is a failure of the whole batch.
        """
