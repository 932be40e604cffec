from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from clients.engine_speed import EngineSpeed, Figure, Settings, evenly_spaced, plan, prefill_starts
from engine.batch import Chunk
from engine.config import ModelConfig
from engine.cost import multiply_adds
from engine.kernels.protocol import Rows, begin
from engine.kv_cache import KVCache
from engine.rope import RopeConfig

CONFIG = ModelConfig(
    architecture="llama",
    name="fake",
    n_layers=1,
    d_model=8,
    n_heads=1,
    n_kv_heads=1,
    d_head=1,
    d_ff=8,
    vocab_size=100,
    max_context=1000,
    norm_eps=1e-5,
    rope=RopeConfig(base=10000.0, dim=8),
    tied=True,
)


@dataclass
class FakeModel:
    """A model that takes a second per forward, one more per row and per 100 positions before a chunk; it keeps ids."""

    config: ModelConfig = CONFIG
    now: float = 0.0
    forwards: list[Sequence[Chunk]] = field(default_factory=list)

    def new_cache(self, n_slots: int, max_len: int, dtype: str) -> KVCache:
        return KVCache(1, 1, 1, max_len, batch=n_slots, dtype=dtype)

    def forward(self, chunks: Sequence[Chunk], cache: KVCache) -> None:
        begin(chunks, cache)
        rows = Rows.of(chunks)
        ids = rows.token_ids.reshape(-1, 1, 1)
        cache.append(0, rows.slots, rows.positions, ids, ids)
        self.forwards.append(chunks)
        self.now += 1 + len(rows.token_ids) + sum(chunk.start for chunk in chunks) / 100


def measured(phase: str, context: int, batch: int, *, chunk: int = 256, num_steps: int = 8) -> tuple[Figure, FakeModel]:
    """The figure with two repeats, and the model with the forwards of the second."""
    model = FakeModel()
    settings = Settings(
        batches=(batch,), contexts=(context,), chunk=chunk, num_steps=num_steps, repeats=2, kv_dtype="float32", seed=0
    )
    figures = plan(CONFIG, settings)
    (figure,) = (figure for figure in figures if figure.phase == phase)
    speed = EngineSpeed(model, figures, settings, lambda: model.now)
    first = speed.seconds(figure)
    model.forwards.clear()
    second = speed.seconds(figure)
    assert first == pytest.approx(second)
    return Figure(
        **{name: getattr(figure, name) for name in Figure.__struct_fields__} | {"seconds": (first, second)}
    ), model


def test_a_decode_is_a_row_of_each_sequence_at_the_context_and_the_positions_after_it():
    figure, model = measured("decode", 128, 4, num_steps=3)

    assert [[chunk.start for chunk in chunks] for chunks in model.forwards] == [[128] * 4, [129] * 4, [130] * 4]
    assert all(
        [chunk.slot for chunk in chunks] == [0, 1, 2, 3] and all(len(c.token_ids) == c.n_logits == 1 for c in chunks)
        for chunks in model.forwards
    )
    assert figure.num_tokens == 12
    assert figure.num_forwards == 3
    assert figure.multiply_adds == multiply_adds(CONFIG, 12, 12)
    assert figure.median_s == pytest.approx(3 * (1 + 4) + 4 * (128 + 129 + 130) / 100)
    assert figure.tokens_per_s == pytest.approx(12 / figure.median_s)


@pytest.mark.parametrize(
    ("context", "batch", "chunk"),
    [(128, 1, 256), (128, 4, 256), (300, 1, 100), (250, 1, 100), (200, 3, 150), (4, 64, 16)],
)
def test_a_short_prefill_is_measured_whole(context: int, batch: int, chunk: int):
    figure, model = measured("prefill", context, batch, chunk=chunk)

    by_slot: dict[int, list[Chunk]] = {}
    for chunks in reversed(model.forwards):
        for one in chunks:
            by_slot.setdefault(one.slot, []).append(one)
    for slot in range(batch):
        assert [p for c in by_slot[slot] for p in range(c.start, c.start + len(c.token_ids))] == [*range(context)]
        assert [c.n_logits for c in by_slot[slot]] == [0] * (len(by_slot[slot]) - 1) + [1]
    assert len({tuple(i for c in chunks for i in c.token_ids) for chunks in by_slot.values()}) == 1
    starts = [c.start for chunks in model.forwards for c in chunks]
    assert figure.num_tokens == context * batch
    assert figure.num_forwards == len(model.forwards)
    assert figure.multiply_adds == multiply_adds(CONFIG, context * batch, batch)
    assert figure.median_s == pytest.approx(len(model.forwards) + context * batch + sum(starts) / 100)


def test_of_a_long_prefill_a_few_forwards_stand_for_the_others():
    figure, model = measured("prefill", 900, 2, chunk=20)

    assert len(model.forwards) == 4
    assert model.forwards[0][0].start == 890
    assert model.forwards[-1][0].start == 0
    assert figure.num_forwards == 90
    # The fake's time is linear in the position, so the estimate is the time of all.
    assert figure.median_s == pytest.approx(90 * (1 + 20) + 2 * sum(range(0, 900, 10)) / 100)


def test_forwards_of_a_prefill_hold_at_most_a_chunk_s_rows():
    assert prefill_starts(512, 1, 256) == [0, 256]
    assert prefill_starts(512, 4, 256) == [0, 64, 128, 192, 256, 320, 384, 448]
    assert prefill_starts(100, 1, 256) == [0]
    assert prefill_starts(3, 300, 256) == [0, 1, 2]


def test_evenly_spaced_takes_both_ends():
    assert evenly_spaced(range(10), 3) == [0, 4, 9]
    assert evenly_spaced([5, 6], 3) == [5, 6]
