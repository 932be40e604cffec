"""One tick's work: the engine's chunks, each with the sequence it belongs to."""

import msgspec

from engine.batch import Chunk, Copy
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
        return tuple(w.chunk for w in self.work)

    @property
    def num_tokens(self) -> int:
        return sum(len(w.chunk.token_ids) for w in self.work)
