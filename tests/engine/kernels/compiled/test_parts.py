"""Every row meets each of its partitions exactly once, alone or with its neighbours."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.compiled.attention import PARTITION
from engine.kernels.compiled.parts import attention_parts

CHUNKS = st.lists(st.tuples(st.integers(0, 3 * PARTITION), st.integers(1, 40)), min_size=1, max_size=6)


@given(chunks=CHUNKS, rows_at_once=st.sampled_from([1, 2, 4]))
def test_parts_cover_every_row_and_partition_once(chunks, rows_at_once):
    slots = np.repeat(np.arange(len(chunks)), [n for _, n in chunks])
    positions = np.concatenate([np.arange(start, start + n) for start, n in chunks])
    parts = attention_parts(slots, positions, rows_at_once)
    covered = []
    for row, partition, is_shared in zip(*parts, strict=True):
        rows = range(row, row + (rows_at_once if is_shared else 1))
        assert len({(slots[r], positions[r] - r, positions[r] // PARTITION) for r in rows}) == 1
        covered += [(r, int(partition)) for r in rows]
    expected = [(r, k) for r, position in enumerate(positions) for k in range(position // PARTITION + 1)]
    assert sorted(covered) == expected


def test_long_chunks_are_mostly_shared():
    parts = attention_parts(np.zeros(100, np.int64), np.arange(3, 103), 4)
    assert parts.part_is_shared.sum() == 24
    assert len(parts.part_rows) == 24 + 4
