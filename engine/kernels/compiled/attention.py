"""Attention of query heads that share one key/value head, over one partition of at most 256 positions.

The cache is read once for all heads of the group. It comes in records of 16 positions: the keys turned, [D][16], so
that 16 scores grow without a sum across lanes, then the values, [16][D]. Whatever else runs, a row's scores are sums
over D in order, its softmax sums 16 lanes that a fixed tree folds, its output is a sum over positions in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from engine.kernels.compiled.formats import CACHE_LINE
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import F32, I32, I64, LANES, PTR, F32x16, Function, I32x16, Value, Variable
from engine.kernels.compiled.vectors import exp, fold, lane_numbers

PARTITION = 256
"""Positions whose attention is reduced together, counted from position 0 of the slot."""

BLOCK_POSITIONS = LANES
_MASKED = -3.0e38

# As many accumulators as registers hold, and enough to hide the latency of a fused multiply-add.
_HEADS_AT_ONCE = 4
_COLUMNS_AT_ONCE = 4 * LANES
_WIDTH_STEP = 8


@dataclass(frozen=True)
class HeadShape:
    """What attention kernels are compiled for.

    `group` query heads share a key/value head; a head is `width` elements, a multiple of 16 (narrower heads are padded
    with zeros); a cached number takes `float_bytes`.
    """

    group: int
    width: int
    float_bytes: int

    @property
    def name(self) -> str:
        """The compiled module's name."""
        return f"heads{self.group}_width{self.width}_float{8 * self.float_bytes}"

    @property
    def keys_bytes(self) -> int:
        """Bytes of 16 positions' keys, or values."""
        return BLOCK_POSITIONS * self.width * self.float_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of 16 positions' keys and values of one head."""
        return 2 * self.keys_bytes

    @property
    def partial_bytes(self) -> int:
        """One partition's result: per head the unnormalised output, then all maxima, then all sums of weights."""
        return 4 * self.group * (self.width + 2)


def build(module: ir.Module, path: CPUPath, shape: HeadShape) -> None:
    """Fill `module` with `attend` and `append` for one head shape.

    `attend(queries, records, next_records, stride, count, scale, partial)`: positions 0..count-1 of the partition whose
    16-position records begin at `records`, `stride` bytes apart; queries float32 [group][width]. `next_records` is what
    the caller will ask for next: it is fetched meanwhile.
    `append(keys, values, record, lane)`: one position's key and value into its record.
    """
    _build_append(module, path, shape)
    _Attend(module, path, shape)


class _Attend:
    """Builds `attend`: scores, softmax, mix, a few heads at a time."""

    def __init__(self, module: ir.Module, path: CPUPath, shape: HeadShape) -> None:
        pointers = [(name, PTR) for name in ("queries", "records", "next_records")]
        numbers = [("stride", I64), ("count", I64), ("scale", F32), ("partial", PTR)]
        self._f = Function(module, f"{module.name}.attend", pointers + numbers, exported=True)
        self._path = path
        self._shape = shape
        self._weights = self._f.scratch(4 * PARTITION * shape.group)
        self._blocks = (self._f["count"] + (BLOCK_POSITIONS - 1)) // BLOCK_POSITIONS
        for first in range(0, shape.group, _HEADS_AT_ONCE):
            heads = range(first, min(first + _HEADS_AT_ONCE, shape.group))
            for head, maximum in zip(heads, self._score(heads), strict=True):
                self._soften(head, maximum)
            for column in range(0, shape.width, _COLUMNS_AT_ONCE):
                self._mix(heads, range(column, min(column + _COLUMNS_AT_ONCE, shape.width), LANES))
        self._f.finish()

    def _weights_of(self, head: int) -> Value:
        """The head's 256 scores, later weights."""
        return self._weights + head * (4 * PARTITION)

    def _score(self, heads: range) -> list[Value]:
        """Scores of `heads` at every position, and their maxima."""
        f = self._f
        maxima = [f.variable(f.constant(F32x16, _MASKED)) for _ in heads]
        with f.range(0, self._blocks // 2) as pair:
            self._score_blocks(heads, maxima, [pair * 2, pair * 2 + 1])
        with f.when((self._blocks % 2).equals(1)):
            self._score_blocks(heads, maxima, [self._blocks - 1])
        return [fold(maximum.value, Value.maximum) for maximum in maxima]

    def _score_blocks(self, heads: range, maxima: Sequence[Variable], blocks: Sequence[Value]) -> None:
        f, shape = self._f, self._shape
        row_bytes = BLOCK_POSITIONS * shape.float_bytes
        keys = [f["records"] + f["stride"] * block for block in blocks]
        totals = [[f.variable(f.constant(F32x16, 0.0)) for _ in heads] for _ in blocks]
        with f.range(0, shape.width, step=_WIDTH_STEP) as first:
            for d in range(_WIDTH_STEP):
                columns = [self._load(key + first * row_bytes + d * row_bytes) for key in keys]
                for h, head in enumerate(heads):
                    query = (f["queries"] + first * 4 + 4 * (head * shape.width + d)).load(F32).splat()
                    for total, column in zip(totals, columns, strict=True):
                        total[h].value = self._path.fma(f, query, column, total[h].value)
        for block, total in zip(blocks, totals, strict=True):
            position = block * BLOCK_POSITIONS
            for maximum, head, score in zip(maxima, heads, total, strict=True):
                scores = self._exists(position).select(score.value * f["scale"], f.constant(F32x16, _MASKED))
                (self._weights_of(head) + position * 4).store(scores)
                maximum.value = maximum.value.maximum(scores)

    def _soften(self, head: int, maximum: Value) -> None:
        """Scores to weights e^(score - maximum); the maximum and the sum of weights go to `partial`."""
        f, shape = self._f, self._shape
        total = f.variable(f.constant(F32x16, 0.0))
        with f.range(0, self._blocks) as block:
            at = self._weights_of(head) + block * (4 * BLOCK_POSITIONS)
            powers = exp(f, self._path, at.load(F32x16) - maximum)
            powers = self._exists(block * BLOCK_POSITIONS).select(powers, f.constant(F32x16, 0.0))
            at.store(powers)
            total.value = total.value + powers
        maxima = f["partial"] + 4 * shape.group * shape.width
        (maxima + 4 * head).store(maximum)
        (maxima + 4 * (shape.group + head)).store(fold(total.value, Value.__add__))

    def _mix(self, heads: range, columns: range) -> None:
        """Values weighted and summed over positions, for some columns of `heads`."""
        f, shape = self._f, self._shape
        totals = [[f.variable(f.constant(F32x16, 0.0)) for _ in columns] for _ in heads]
        with f.range(0, self._blocks) as block:
            values = f["records"] + f["stride"] * block + shape.keys_bytes
            first = block * BLOCK_POSITIONS
            with f.range(0, (f["count"] - first).minimum(f.constant(I64, BLOCK_POSITIONS))) as i:
                if heads.start == 0 and columns.start == 0:
                    self._prefetch_next(block, i)
                row = values + i * (shape.width * shape.float_bytes)
                loaded = [self._load(row + column * shape.float_bytes) for column in columns]
                for head, total in zip(heads, totals, strict=True):
                    weight = (self._weights_of(head) + (first + i) * 4).load(F32).splat()
                    for column_total, value in zip(total, loaded, strict=True):
                        column_total.value = self._path.fma(f, weight, value, column_total.value)
        for head, total in zip(heads, totals, strict=True):
            for column, column_total in zip(columns, total, strict=True):
                (f["partial"] + 4 * (head * shape.width + column)).store(column_total.value)

    def _prefetch_next(self, block: Value, i: Value) -> None:
        """Ask for position i's sixteenth of the same record of what comes next."""
        share = self._shape.record_bytes // BLOCK_POSITIONS
        for line in range(0, share, CACHE_LINE):
            (self._f["next_records"] + self._f["stride"] * block + i * share + line).prefetch(locality=2)

    def _exists(self, position: Value) -> Value:
        """Which of the 16 positions from `position` on the row may see."""
        return lane_numbers(self._f) < (self._f["count"] - position).to(I32).splat()

    def _load(self, at: Value) -> Value:
        return self._path.load_float16(at) if self._shape.float_bytes == 2 else at.load(F32x16)


def _build_append(module: ir.Module, path: CPUPath, shape: HeadShape) -> None:
    params = [("keys", PTR), ("values", PTR), ("record", PTR), ("lane", I64)]
    f = Function(module, f"{module.name}.append", params, exported=True)
    size = shape.float_bytes

    def to_cached(at: Value) -> Value:
        numbers = at.load(F32x16)
        return path.to_float16(f, numbers) if size == 2 else numbers.bitcast(I32x16)

    values_row = f["record"] + shape.keys_bytes + f["lane"] * (shape.width * size)
    for column in range(0, shape.width, LANES):
        (values_row + column * size).store(to_cached(f["values"] + 4 * column))
        key = to_cached(f["keys"] + 4 * column)
        for i in range(LANES):
            (f["record"] + (column + i) * (BLOCK_POSITIONS * size) + f["lane"] * size).store(key.lane(i))
    f.finish()
