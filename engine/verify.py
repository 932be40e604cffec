"""The exactness contract put to the test: every logit of random mixes against the same sequence run alone, bitwise."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

import msgspec
import numpy as np

from engine.batch import Chunk, Copy
from engine.kernels.protocol import Cache, FloatArray
from engine.mixes import Mix, MixedSequence, Tick, random_mix

KINDS = {
    "cache": ("float16", "float32"),
    "slot": ("fresh", "reused", "truncated", "copied"),
    "computed as": ("prompt in one chunk", "prompt in chunks", "decode"),
    "tick": ("prefill", "decode", "mixed"),
    "sequences in the tick": ("1", "2 to 4", "5 to 16", "17 to 32"),
}
"""What a compared row can have gone through: one kind of each group. Another group is the number of threads."""


class Limits(Protocol):
    """What a model says of its size."""

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""

    @property
    def max_context(self) -> int:
        """How many positions a sequence may have."""


class Subject(Protocol):
    """What is verified: a `Model`."""

    @property
    def config(self) -> Limits:
        """Its size."""

    def new_cache(self, n_slots: int, max_len: int, dtype: str) -> Cache:
        """As `Model.new_cache`."""

    def forward(self, chunks: tuple[Chunk, ...], cache: Cache) -> FloatArray:
        """As `Model.forward`."""


Subjects = Mapping[int, Subject]
"""One and the same model by the number of threads that run it, at least one."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One row whose logits in the mix are not those of the solo run.

    `seed` and `mix` give the same mix again; the row is the one at `position` (of `token_id`) in the chunk of `slot` at
    `tick`, of these `kinds` by group. Of its logits `num_differing` differ, by `largest` at most (None if one is not a
    number); at `first`, the lowest id, they are `alone` and `mixed`, written exactly, as `float.hex` does.
    """

    seed: int
    mix: int
    tick: int
    slot: int
    position: int
    token_id: int
    kinds: Mapping[str, str]
    num_sequences: int
    num_rows: int
    num_differing: int
    largest: float | None
    first: int
    alone: str
    mixed: str


class Count(msgspec.Struct, frozen=True):
    """How many rows were compared, and how many of them differed."""

    num_rows: int = 0
    num_differing: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared. `kinds` has a count for each kind of each group."""

    seed: int
    num_mixes: int
    num_sequences: int
    total: Count
    kinds: Mapping[str, Mapping[str, Count]]
    first_difference: Difference | None

    @property
    def is_exact(self) -> bool:
        """Whether rows were compared and all were equal."""
        return self.total.num_rows > 0 and self.total.num_differing == 0


Progress = Callable[[Report], None]


def verify(
    models: Subjects, *, seed: int, seconds: float, clock: Callable[[], float], progress: Progress = lambda _: None
) -> Report:
    """What came of mixes 0, 1, ... of `seed`, begun until `seconds` by `clock` are over.

    The `models` take turns with mixes; solo runs have the fewest threads. A mix is cut short when the time is over, but
    the first sequence is always compared. `progress` is called after each one.
    """
    deadline = clock() + seconds
    tally = _Tally.of(models, seed)
    for number in itertools.count():
        for _ in _compared(models, seed, number, tally):
            progress(tally.report())
            if clock() >= deadline:
                return tally.report()
    raise AssertionError("mixes never end")


def verify_mix(models: Subjects, *, seed: int, number: int) -> Report:
    """What came of one whole mix."""
    tally = _Tally.of(models, seed)
    for _ in _compared(models, seed, number, tally):
        pass
    return tally.report()


class _MixedRow(NamedTuple):
    logits: FloatArray
    tick: int
    slot: int
    kinds: Mapping[str, str]


Rows = dict[int, _MixedRow]
"""The rows of one sequence that wanted logits, by position."""


def _compared(models: Subjects, seed: int, number: int, tally: "_Tally") -> Iterator[None]:
    """Run a mix and compare it in `tally`, yielding after each sequence that had rows to compare."""
    single = models[min(models)]
    config = single.config
    mix = random_mix(seed, number, vocab_size=config.vocab_size, max_context=config.max_context)
    # So that each number of threads soon meets all that takes turns in mixes.
    threads = sorted(models)[(number // 2 + number // 8) % len(models)]
    tally.num_mixes += 1
    in_company = _run(models[threads], mix, threads)
    for sequence, rows in zip(mix.sequences, in_company, strict=True):
        if rows:
            for position, logits in _alone(single, sequence, mix.kv_dtype, rows):
                tally.add(mix, position, logits, rows[position])
            tally.num_sequences += 1
            yield


def _run(model: Subject, mix: Mix, threads: int) -> list[Rows]:
    """The rows of each sequence of `mix`, run as it says by `model` with `threads`."""
    cache = model.new_cache(mix.n_slots, mix.max_len, mix.kv_dtype)
    rows: list[Rows] = [{} for _ in mix.sequences]
    num_chunks = [0] * len(mix.sequences)
    for number, tick in enumerate(mix.ticks):
        for step in tick.before:
            if isinstance(step, Copy):
                cache.copy(step.source, step.target, step.length)
            else:
                cache.truncate(step.length, step.slot)
        logits = iter(model.forward(tick.chunks, cache))
        for index, chunk in zip(tick.sequences, tick.chunks, strict=True):
            sequence = mix.sequences[index]
            num_chunks[index] += 1
            end = chunk.start + len(chunk.token_ids)
            for position in range(end - chunk.n_logits, end):
                kinds = _kinds(mix, tick, sequence, chunk, is_first=num_chunks[index] == 1)
                rows[index][position] = _MixedRow(next(logits), number, chunk.slot, kinds | {"threads": str(threads)})
    return rows


def _kinds(mix: Mix, tick: Tick, sequence: MixedSequence, chunk: Chunk, *, is_first: bool) -> dict[str, str]:
    """The kind of `chunk`'s rows in each group."""
    is_prefill = [
        chunk.start < mix.sequences[index].num_prompt for index, chunk in zip(tick.sequences, tick.chunks, strict=True)
    ]
    if chunk.start >= sequence.num_prompt:
        computed_as = "decode"
    elif is_first and chunk.start + len(chunk.token_ids) == sequence.num_prompt:
        computed_as = "prompt in one chunk"
    else:
        computed_as = "prompt in chunks"
    kinds = (
        mix.kv_dtype,
        sequence.origin,
        computed_as,
        "prefill" if all(is_prefill) else "mixed" if any(is_prefill) else "decode",
        _company(len(tick.chunks)),
    )
    return dict(zip(KINDS, kinds, strict=True))


def _company(num_sequences: int) -> str:
    if num_sequences == 1:
        return "1"
    low, high = next((low, high) for low, high in ((2, 4), (5, 16), (17, 32)) if num_sequences <= high)
    return f"{low} to {high}"


def _alone(model: Subject, sequence: MixedSequence, kv_dtype: str, wanted: Rows) -> Iterator[tuple[int, FloatArray]]:
    """The logits of the `wanted` positions when nothing else runs: the prompt at once, then token by token."""
    end = max(wanted) + 1
    num_prompt = min(sequence.num_prompt, end)
    cache = model.new_cache(1, end, kv_dtype)
    first = min(wanted)
    n_logits = max(num_prompt - first, 0)
    chunk = Chunk(0, 0, sequence.token_ids[:num_prompt], n_logits)
    for position, logits in enumerate(model.forward((chunk,), cache), num_prompt - n_logits):
        if position in wanted:
            yield position, logits
    for position in range(num_prompt, end):
        (logits,) = model.forward((Chunk(0, position, (sequence.token_ids[position],)),), cache)
        if position in wanted:
            yield position, logits


@dataclass(slots=True)
class _Tally:
    """A report in the making."""

    seed: int
    kinds: dict[str, dict[str, Count]]
    num_mixes: int = 0
    num_sequences: int = 0
    total: Count = field(default_factory=Count)
    first_difference: Difference | None = None

    @classmethod
    def of(cls, models: Subjects, seed: int) -> Self:
        groups = {**KINDS, "threads": tuple(map(str, sorted(models)))}
        return cls(seed, {group: dict.fromkeys(kinds, Count()) for group, kinds in groups.items()})

    def add(self, mix: Mix, position: int, alone: FloatArray, mixed: _MixedRow) -> None:
        is_equal = np.array_equal(alone.view(np.uint32), mixed.logits.view(np.uint32))
        self.total = _more(self.total, is_equal)
        for group, kind in mixed.kinds.items():
            self.kinds[group][kind] = _more(self.kinds[group][kind], is_equal)
        if not is_equal and self.first_difference is None:
            self.first_difference = _difference(mix, position, alone, mixed)

    def report(self) -> Report:
        return Report(
            seed=self.seed,
            num_mixes=self.num_mixes,
            num_sequences=self.num_sequences,
            total=self.total,
            kinds={group: dict(counts) for group, counts in self.kinds.items()},
            first_difference=self.first_difference,
        )


def _more(count: Count, is_equal: bool) -> Count:
    return Count(count.num_rows + 1, count.num_differing + (not is_equal))


def _difference(mix: Mix, position: int, alone: FloatArray, mixed: _MixedRow) -> Difference:
    tick = mix.ticks[mixed.tick]
    (chunk,) = (chunk for chunk in tick.chunks if chunk.slot == mixed.slot)
    differing = np.flatnonzero(alone.view(np.uint32) != mixed.logits.view(np.uint32))
    first = int(differing[0])
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(alone.astype(np.float64) - mixed.logits)[differing].max())
    return Difference(
        seed=mix.seed,
        mix=mix.number,
        tick=mixed.tick,
        slot=mixed.slot,
        position=position,
        token_id=chunk.token_ids[position - chunk.start],
        kinds=mixed.kinds,
        num_sequences=len(tick.chunks),
        num_rows=sum(len(chunk.token_ids) for chunk in tick.chunks),
        num_differing=len(differing),
        largest=largest if math.isfinite(largest) else None,
        first=first,
        alone=float(alone[first]).hex(),
        mixed=float(mixed.logits[first]).hex(),
    )
