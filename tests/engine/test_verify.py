import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.batch import Chunk
from engine.kernels.protocol import begin
from engine.kv_cache import KVCache
from engine.mixes import random_mix
from engine.model import Model
from engine.verify import KINDS, Count, Report, verify, verify_mix
from tests.tiny_model import write_tiny_llama

VOCAB = 16


@dataclass(frozen=True)
class Config:
    vocab_size: int = VOCAB
    max_context: int = 400


class FakeCache(KVCache):
    """A cache whose keys are the token ids."""

    def __init__(self, n_slots: int, max_len: int, dtype: str):
        super().__init__(1, 1, 1, max_len, batch=n_slots, dtype=dtype)

    def ids(self, slot: int) -> np.ndarray:
        return self.read(0, slot, self.seq_len(slot=slot))[0][0, :, 0]


@dataclass(frozen=True)
class Row:
    """All that a kernel could wrongly let a row's logits depend on."""

    ids: tuple[int, ...]
    chunk: Chunk
    chunks: Sequence[Chunk]
    cache: FakeCache


def right(row: Row) -> np.ndarray:
    return np.sin(np.arange(1, VOCAB + 1) * (hash(row.ids) % 1000003)).astype(np.float32)


def no_fault(_: Row) -> float:
    return 0.0


class FakeModel:
    """A model whose logits are a hash of a row's own ids, unless `fault` of the row says by how much they are off."""

    config = Config()

    def __init__(self, fault: Callable[[Row], float] = no_fault):
        self._fault = fault

    def new_cache(self, n_slots: int, max_len: int, dtype: str) -> FakeCache:
        return FakeCache(n_slots, max_len, dtype)

    def forward(self, chunks: Sequence[Chunk], cache: FakeCache) -> np.ndarray:
        begin(chunks, cache)
        for chunk in chunks:
            n = len(chunk.token_ids)
            ids = np.array(chunk.token_ids, np.float32).reshape(n, 1, 1)
            positions = np.arange(chunk.start, chunk.start + n)
            cache.append(0, np.full(n, chunk.slot), positions, ids, ids)
        logits = []
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            for position in range(end - chunk.n_logits, end):
                row = Row(tuple(cache.ids(chunk.slot)[: position + 1].astype(int)), chunk, chunks, cache)
                logits.append(right(row))
                logits[-1][3] += np.float32(self._fault(row))
        return np.array(logits, np.float32).reshape(-1, VOCAB)


def verified(model: Any, num_ticks: int = 150) -> Report:
    """Verification by a clock that counts how often it is read."""
    return verify({1: model}, seed=0, seconds=num_ticks, clock=itertools.count().__next__)


def neighbour_ids(row: Row) -> list[int]:
    return [token_id for chunk in row.chunks if chunk is not row.chunk for token_id in chunk.token_ids]


FAULTS: dict[str, Callable[[Row], float]] = {
    "batch size": lambda row: 1e-6 * (len(row.chunks) > 1),
    "batch size, but only from 17 on": lambda row: 1e-6 * (len(row.chunks) > 16),
    "number of rows": lambda row: 1e-6 * (sum(len(chunk.token_ids) for chunk in row.chunks) % 8 == 5),
    "neighbours' tokens": lambda row: 1e-6 * (sum(neighbour_ids(row)) % 7 == 1),
    "a neighbour's prefill": lambda row: 1e-6 * any(len(chunk.token_ids) > 8 for chunk in row.chunks[1:]),
    "order of the chunks": lambda row: 1e-6 * (row.chunks[-1] is row.chunk and row.chunk.slot < row.chunks[0].slot),
    "slot": lambda row: 1e-6 * row.chunk.slot,
    "number of slots": lambda row: 1e-6 * (row.cache.n_slots > 1),
    "a slot that is far away": lambda row: 1e-6 * (row.chunk.slot > 20),
    "where the chunk starts": lambda row: 1e-6 * (0 < row.chunk.start < len(row.ids) - 1),
    "chunk length": lambda row: 1e-6 * (len(row.chunk.token_ids) in {3, 5, 6, 7}),
    "which rows want logits": lambda row: 1e-6 * (len(row.ids) != row.chunk.start + len(row.chunk.token_ids)),
    "float32 caches alone, by company": lambda row: 1e-6 * (row.cache.dtype == np.float32 and len(row.chunks) > 3),
    "what long contexts do": lambda row: 1e-6 * (len(row.ids) > 256 and len(row.chunks) > 1),
    "company, to NaN": lambda row: np.nan if len(row.chunks) > 1 else 0.0,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_logits_that_depend_on_it_are_found(fault: Callable[[Row], float]):
    reports: list[Report] = []
    ticks = itertools.count()

    def clock() -> float:
        return 1000 if reports and reports[-1].first_difference else next(ticks)

    report = verify({1: FakeModel(fault)}, seed=0, seconds=900, clock=clock, progress=reports.append)

    assert not report.is_exact
    assert report.total.num_differing > 0


class KeepingCache(FakeCache):
    """One that forgets to forget: a slot that was used keeps its old ids beyond a truncation."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.longest: dict[int, int] = {}

    def truncate(self, length: int, slot: int | None = None) -> None:
        assert slot is not None
        self.longest[slot] = max(self.longest.get(slot, 0), self.seq_len(slot=slot))
        super().truncate(length, slot)


class LossyCopyCache(FakeCache):
    """One whose copies lack their last position."""

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self._keys[:, target, :, length - 1] = 0


def test_what_a_slot_held_before_is_found_if_it_matters():
    def fault(row: Row) -> float:
        assert isinstance(row.cache, KeepingCache)
        return 1e-6 * (row.cache.longest.get(row.chunk.slot, 0) > len(row.ids))

    model = FakeModel(fault)
    model.new_cache = KeepingCache  # type: ignore[method-assign]

    report = verified(model)

    assert report.kinds["slot"]["reused"].num_differing > 0
    assert report.kinds["slot"]["truncated"].num_differing > 0
    assert report.kinds["slot"]["fresh"].num_differing == 0


def test_logits_that_depend_on_the_number_of_threads_are_found():
    models = {1: FakeModel(), 2: FakeModel(lambda _: 1e-6)}

    report = verify(models, seed=0, seconds=300, clock=itertools.count().__next__)

    one, two = report.kinds["threads"].values()
    assert (one.num_rows > 0, one.num_differing) == (True, 0)
    assert two.num_rows == two.num_differing > 0
    assert report.first_difference is not None
    assert report.first_difference.kinds["threads"] == "2"
    assert verify_mix(models, seed=0, number=report.first_difference.mix).first_difference == report.first_difference


def test_wrong_copies_are_found():
    model = FakeModel()
    model.new_cache = LossyCopyCache  # type: ignore[method-assign]

    report = verified(model)

    assert report.kinds["slot"]["copied"].num_differing > 0
    assert report.kinds["slot"]["fresh"].num_differing == 0


def test_a_zero_of_the_other_sign_is_a_difference():
    class Signed(FakeModel):
        def forward(self, chunks: Sequence[Chunk], cache: FakeCache) -> np.ndarray:
            logits = super().forward(chunks, cache)
            logits[:, 5] = 0.0 if len(chunks) == 1 else -0.0
            return logits

    report = verified(Signed())

    assert report.first_difference is not None
    assert (report.first_difference.first, report.first_difference.num_differing) == (5, 1)
    assert (report.first_difference.alone, report.first_difference.mixed) == ("0x0.0p+0", "-0x0.0p+0")


def test_a_model_that_keeps_the_contract_passes_with_every_kind_of_row_compared():
    report = verified(FakeModel(), 600)

    assert report.is_exact
    assert report.first_difference is None
    assert {group: (*counts,) for group, counts in report.kinds.items()} == {**KINDS, "threads": ("1",)}
    for counts in report.kinds.values():
        assert all(count.num_rows > 0 for count in counts.values())
        assert sum(count.num_rows for count in counts.values()) == report.total.num_rows


def test_a_report_without_a_row_proves_nothing():
    empty = msgspec.structs.replace(verified(FakeModel(), 1), total=Count())

    assert not empty.is_exact


def test_a_difference_is_described_so_that_it_can_be_had_again():
    model = FakeModel(FAULTS["batch size"])

    difference = verified(model).first_difference
    assert difference is not None
    again = verify_mix({1: model}, seed=difference.seed, number=difference.mix)

    assert again.first_difference == difference
    mix = random_mix(difference.seed, difference.mix, vocab_size=VOCAB, max_context=model.config.max_context)
    tick = mix.ticks[difference.tick]
    (chunk,) = (chunk for chunk in tick.chunks if chunk.slot == difference.slot)
    assert chunk.token_ids[difference.position - chunk.start] == difference.token_id
    assert difference.num_sequences == len(tick.chunks) > 1
    assert difference.num_rows == sum(len(chunk.token_ids) for chunk in tick.chunks)
    assert (difference.first, difference.num_differing) == (3, 1)
    assert difference.largest == pytest.approx(1e-6, rel=0.1)
    assert float.fromhex(difference.mixed) - float.fromhex(difference.alone) == pytest.approx(1e-6, rel=0.1)


def test_work_is_handed_out_until_the_time_is_used_and_not_less_than_one_sequence():
    seen: list[Report] = []

    shortest = verify({1: FakeModel()}, seed=0, seconds=0, clock=itertools.count().__next__)
    longer = verify({1: FakeModel()}, seed=0, seconds=50, clock=itertools.count().__next__, progress=seen.append)

    assert shortest.num_sequences == 1
    assert longer.num_sequences == len(seen) == 50
    assert seen[-1] == longer


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "reference-int8"])
def test_a_small_model_on_the_reference_kernels_passes(tmp_path: Path, kernels: str):
    model = Model.load(write_tiny_llama(tmp_path / "tiny.gguf", quant="Q8_0", max_context=400), kernels=kernels)

    report = verified(model)

    assert report.is_exact
    assert report.num_sequences == 150
