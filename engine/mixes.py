"""Random mixes of sequences: what a busy server may ask of a model, as plain data.

A `Mix` is a script for one cache: sequences begin in fresh and in used slots, go on from what a slot or its copy still
holds, are prefilled in chunks, decoded side by side in any order, and abandoned. Everything in it is drawn from a seed
and a number alone, so that a mix can be had again.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from engine.batch import Chunk, Copy

MAX_SLOTS = 32
MAX_DECODES = 6
ROWS = (64, 256, 1024)
"""About as many rows are computed by the mixes of the first turn, the second, and all others."""

_TURN = 8
"""Mixes until each KV dtype has met each quarter of the numbers of slots."""
_LONGEST_PROMPTS = (6, 24, 96, 320, 640)
_LARGEST_CHUNKS = (1, 5, 16, 64, 256, 1024)
_SCORED_PROMPT_TAIL = 64
"""Only this many positions at the end of a prompt may want logits: a solo run computes all from the first wanted on."""

Origin = Literal["fresh", "reused", "truncated", "copied"]


class Truncation(msgspec.Struct, frozen=True):
    """Everything at `length` and beyond in `slot` is forgotten."""

    slot: int
    length: int


class Tick(msgspec.Struct, frozen=True):
    """One forward, `chunks[i]` being of sequence `sequences[i]`, and what is done to the cache before it, in order."""

    before: tuple[Truncation | Copy, ...]
    chunks: tuple[Chunk, ...]
    sequences: tuple[int, ...]


class MixedSequence(msgspec.Struct, frozen=True):
    """Alone it would be one prompt of `num_prompt` tokens, then one forward for each of the other `token_ids`."""

    token_ids: tuple[int, ...]
    num_prompt: int
    origin: Origin


class Mix(msgspec.Struct, frozen=True):
    """`ticks` for a cache of `n_slots` times `max_len` positions."""

    seed: int
    number: int
    n_slots: int
    max_len: int
    kv_dtype: str
    sequences: tuple[MixedSequence, ...]
    ticks: tuple[Tick, ...]


def random_mix(seed: int, number: int, *, vocab_size: int, max_context: int) -> Mix:
    """Mix `number` of `seed`, both >= 0, for a model with a context of at least 2.

    KV dtypes and numbers of slots take turns, and the first mixes are small: slow kernels see some of everything soon.
    """
    rng = np.random.default_rng((seed, number))
    rows = ROWS[min(number // _TURN, len(ROWS) - 1)]
    quarter = number // 2 % 4
    n_slots = int((MAX_SLOTS + 1) ** ((quarter + rng.random()) / 4))
    # With longer prompts the slots would not come to run side by side.
    longest_prompts = [n for n in _LONGEST_PROMPTS if n < rows and n * n_slots <= 4 * rows]
    longest_prompt = min(int(rng.choice(longest_prompts[-2:])), max_context - 1)
    planner = _Planner(
        rng=rng,
        vocab_size=vocab_size,
        longest_prompt=longest_prompt,
        max_len=min(longest_prompt + MAX_DECODES, max_context),
        # A long prompt token by token would be a mix of its own.
        largest_chunk=max(int(rng.choice(_LARGEST_CHUNKS)), longest_prompt // 16),
        haste=min(rng.uniform(0.4, 1.3), 1.0),
        rows_left=rows,
        held=[None] * n_slots,
    )
    ticks = planner.ticks()
    return Mix(
        seed=seed,
        number=number,
        n_slots=n_slots,
        max_len=planner.max_len,
        kv_dtype=("float16", "float32")[number % 2],
        sequences=tuple(planner.sequences),
        ticks=ticks,
    )


@dataclass(slots=True)
class _Running:
    """A sequence in a slot: its index, where it goes on, and where it ends or is abandoned."""

    index: int
    position: int
    end: int


@dataclass(slots=True, kw_only=True)
class _Planner:
    """Draws one mix. `held` are the ids each slot's cache holds, None for a slot never used."""

    rng: np.random.Generator
    vocab_size: int
    longest_prompt: int
    max_len: int
    largest_chunk: int
    haste: float
    rows_left: int
    held: list[tuple[int, ...] | None]
    sequences: list[MixedSequence] = field(default_factory=list)
    _running: dict[int, _Running] = field(default_factory=dict)

    def ticks(self) -> tuple[Tick, ...]:
        ticks = []
        while self.rows_left > 0 or self._running:
            before: list[Truncation | Copy] = []
            for slot in self.rng.permutation(len(self.held)).tolist():
                if slot not in self._running and self.rows_left > 0 and self._happens(self.haste):
                    before += self._admit(slot)
            moving = [slot for slot in self.rng.permutation([*self._running]).tolist() if self._happens(self.haste)]
            if moving or before:
                # Never an empty tick: what was done to the cache needs a forward to go with.
                ticks.append(self._tick(before, moving or [next(iter(self._running))]))
        return tuple(ticks)

    def _tick(self, before: list[Truncation | Copy], slots: list[int]) -> Tick:
        indices = tuple(self._running[slot].index for slot in slots)
        return Tick(tuple(before), tuple(self._advance(slot) for slot in slots), indices)

    def _admit(self, slot: int) -> list[Truncation | Copy]:
        """Begin a new sequence in `slot`; returns what makes the cache ready for it."""
        held = self.held[slot] or ()
        origin: Origin = "fresh" if self.held[slot] is None else "reused"
        before: list[Truncation | Copy] = []
        kept: tuple[int, ...] = ()
        can_keep = self.longest_prompt > 1
        sources = [other for other, ids in enumerate(self.held) if ids and other != slot]
        if can_keep and sources and self._happens(0.3):
            source = int(self.rng.choice(sources))
            kept, origin = self._prefix(self.held[source] or ()), "copied"
            before.append(Copy(source, slot, len(kept)))
        elif can_keep and held and self._happens(0.5):
            kept, origin = self._prefix(held), "truncated"
            if self._happens(0.5):  # else the next chunk's start says it
                before.append(Truncation(slot, len(kept)))
        num_prompt = max(self._prompt_length(), len(kept) + 1)
        length = min(num_prompt + int(self.rng.integers(0, MAX_DECODES + 1)), self.max_len)
        new = self.rng.integers(0, self.vocab_size, length - len(kept)).tolist()
        is_abandoned = self._happens(0.1)
        end = int(self.rng.integers(len(kept) + 1, length + 1)) if is_abandoned else length
        self._running[slot] = _Running(len(self.sequences), len(kept), end)
        self.rows_left -= end - len(kept)
        self.sequences.append(MixedSequence((*kept, *new), num_prompt, origin))
        self.held[slot] = kept
        return before

    def _advance(self, slot: int) -> Chunk:
        """The next chunk of the sequence in `slot`."""
        running = self._running[slot]
        sequence = self.sequences[running.index]
        start = running.position
        room = min(sequence.num_prompt, running.end) - start if start < sequence.num_prompt else 1
        size = min(room, self.largest_chunk)
        if self._happens(0.5):
            size = int(self.rng.integers(1, size + 1))
        running.position = end = start + size
        self.held[slot] = sequence.token_ids[:end]
        if end == running.end:
            del self._running[slot]
        n_logits = int(end >= sequence.num_prompt)
        num_in_tail = end - (sequence.num_prompt - _SCORED_PROMPT_TAIL)
        if num_in_tail > 0 and self._happens(0.2):
            n_logits = int(self.rng.integers(n_logits, min(size, num_in_tail) + 1))
        return Chunk(slot, start, sequence.token_ids[start:end], n_logits)

    def _prompt_length(self) -> int:
        """Mostly short; now and then as likely long."""
        if self._happens(0.3):
            return int(self.rng.integers(1, self.longest_prompt + 1))
        return int((self.longest_prompt + 1) ** self.rng.random())

    def _prefix(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """A random beginning of `ids`, not empty, that leaves room for more of a prompt."""
        return ids[: int(self.rng.integers(1, min(len(ids), self.longest_prompt - 1) + 1))]

    def _happens(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)
