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


def prefill_work(sequence: Sequence, num_tokens: int) -> Work:
    """The next `num_tokens` of a prompt; logits only where they are scored or sampled from."""
    assert sequence.slot is not None
    start, end = sequence.num_computed, sequence.num_computed + num_tokens
    samples = end == sequence.num_prompt and sequence.limit > 0
    n_logits = num_tokens if sequence.is_scored else int(samples)
    return Work(sequence, Chunk(sequence.slot, start, sequence.request.prompt_ids[start:end], n_logits), samples)


def decode_work(sequence: Sequence, source: Sequence | None) -> Work:
    """One row; with a `source` it is the last token of the prompt, behind the rows copied from there."""
    assert sequence.slot is not None
    samples = sequence.limit > 0
    if source is None:
        start, token_id = sequence.num_computed, sequence.next_token_id
    else:
        start, token_id = sequence.prefill_end, sequence.request.prompt_ids[-1]
    return Work(sequence, Chunk(sequence.slot, start, (token_id,), int(samples)), samples)


def prompt_copy(source: Sequence, target: Sequence) -> Copy:
    """What spares `target` its prefill: the rows of its prompt that `source` has."""
    assert source.slot is not None
    assert target.slot is not None
    return Copy(source.slot, target.slot, target.prefill_end)


class Backend(Protocol):
    """Runs batches, one at a time, in whatever thread the loop chooses."""

    def run(self, batch: Batch) -> list[Result]:
        """Copy, then compute: one result for each of `batch.work`, in order.

        A failure of one row is a `RowError` in its place; an exception is a failure of the whole batch.
        """
