"""How the attention of a ragged batch is cut into parts that threads can take."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.kernels.compiled.attention import PARTITION

Ids = NDArray[np.int64]


class AttentionParts(NamedTuple):
    """One entry a part, int64 each: its first row, its partition, and whether further rows share it."""

    part_rows: Ids
    part_partitions: Ids
    part_is_shared: Ids


def attention_parts(slots: Ids, positions: Ids, rows_at_once: int) -> AttentionParts:
    """The parts of rows at `positions` of `slots`.

    Rows share their parts where `rows_at_once` of them follow each other in one slot from a multiple of
    `rows_at_once` on: they then have the same partitions.
    """
    n = len(positions)
    leads = np.zeros(n, np.bool_)
    if rows_at_once > 1 and n >= rows_at_once:
        step = rows_at_once - 1
        follow = (slots[step:] == slots[:-step]) & (positions[step:] - positions[:-step] == step)
        leads[: n - step] = follow & (positions[: n - step] % rows_at_once == 0)
    follows = np.zeros(n, np.bool_)
    for offset in range(1, rows_at_once):
        follows[offset:] |= leads[:-offset]
    rows = np.flatnonzero(~follows)
    partitions = positions[rows] // PARTITION + 1
    part_rows = np.repeat(rows, partitions)
    firsts = np.repeat(np.cumsum(partitions) - partitions, partitions)
    return AttentionParts(part_rows, np.arange(len(part_rows)) - firsts, leads[part_rows].astype(np.int64))
