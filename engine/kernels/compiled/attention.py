"""Attention of query heads that share one key/value head, over one partition of at most 256 positions.

The cache is read once for all heads of the group. It comes in records of 16 positions: the keys turned, [D][16], so
that 16 scores grow without a sum across lanes, then the values, [16][D]. Whatever else runs, a row's scores are sums
over D in order, its softmax sums 16 lanes that a fixed tree folds, its output is a sum over positions in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
_HEADS_AT_ONCE = 6
_FEW_HEADS = 3
_MOST_COLUMNS = 4  # of 16 lanes
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
    def rows_at_once(self) -> int:
        """Neighbouring rows of one slot that share a pass over the cache; a power of two, as `PARTITION` is."""
        return 1 << max(0, (_HEADS_AT_ONCE // self.group).bit_length() - 1)

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
    """Fill `module` with `attend_one`, `attend_some` and `append` for one head shape.

    `attend_*(queries, queries_stride, records, next_records, stride, count, scale, partials, partials_stride)`: one
    row, or `rows_at_once` rows of neighbouring positions, against one partition whose 16-position records begin at
    `records`, `stride` bytes apart. The first row sees positions 0..count-1 of it, each further row one more (all of
    it, if it is not the row's last partition). Row r's queries, float32 [group][width], are at
    `queries + r * queries_stride`, its result goes to `partials + r * partials_stride`. `next_records` is what the
    caller will ask for next: it is fetched meanwhile.
    `append(keys, values, record, lane)`: one position's key and value into its record.
    """
    _build_append(module, path, shape)
    _Attend(module, path, shape, "attend_one", n_rows=1)
    _Attend(module, path, shape, "attend_some", n_rows=shape.rows_at_once)


class _Attend:
    """Builds `attend_*`: scores, softmax, mix, a few heads of a few rows at a time."""

    def __init__(self, module: ir.Module, path: CPUPath, shape: HeadShape, name: str, n_rows: int) -> None:
        params = [("queries", PTR), ("queries_stride", I64), ("records", PTR), ("next_records", PTR), ("stride", I64)]
        params += [("count", I64), ("scale", F32), ("partials", PTR), ("partials_stride", I64)]
        self._f = Function(module, f"{module.name}.{name}", params, exported=True)
        self._path = path
        self._shape = shape
        self._weights = self._f.scratch(4 * PARTITION * shape.group * n_rows)
        whole = self._f.constant(I64, PARTITION)
        self._counts = [(self._f["count"] + row).minimum(whole) for row in range(n_rows)]
        self._blocks = _blocks(self._counts[-1])
        heads = [_Head(row, head) for row in range(n_rows) for head in range(shape.group)]
        for first in range(0, len(heads), _HEADS_AT_ONCE):
            self._attend(heads[first : first + _HEADS_AT_ONCE], is_first=first == 0)
        self._f.finish()

    def _attend(self, heads: Sequence["_Head"], is_first: bool) -> None:
        for head, maximum in zip(heads, self._score(heads), strict=True):
            self._soften(head, maximum)
        # One register for a weight and one for a value leave the others for sums.
        columns_at_once = LANES * min(_MOST_COLUMNS, max(1, (self._path.registers - 2) // len(heads)))
        for column in range(0, self._shape.width, columns_at_once):
            columns = range(column, min(column + columns_at_once, self._shape.width), LANES)
            self._mix(heads, columns, prefetch=is_first and column == 0)

    def _weights_of(self, head: "_Head") -> Value:
        """The head's 256 scores, later weights."""
        return self._weights + (head.row * self._shape.group + head.member) * (4 * PARTITION)

    def _partial(self, head: "_Head") -> Value:
        return self._f["partials"] + self._f["partials_stride"] * head.row

    def _score(self, heads: Sequence["_Head"]) -> list[Value]:
        """Scores of `heads` at every position, and their maxima."""
        f = self._f
        maxima = [f.variable(f.constant(F32x16, _MASKED)) for _ in heads]
        if len(heads) <= _FEW_HEADS:
            with f.range(0, self._blocks // 2) as pair:
                self._score_blocks(heads, maxima, [pair * 2, pair * 2 + 1])
            with f.when((self._blocks % 2).equals(1)):
                self._score_blocks(heads, maxima, [self._blocks - 1])
        else:
            with f.range(0, self._blocks) as block:
                self._score_blocks(heads, maxima, [block])
        return [fold(maximum.value, Value.maximum) for maximum in maxima]

    def _score_blocks(self, heads: Sequence["_Head"], maxima: Sequence[Variable], blocks: Sequence[Value]) -> None:
        f, shape = self._f, self._shape
        row_bytes = BLOCK_POSITIONS * shape.float_bytes
        keys = [f["records"] + f["stride"] * block for block in blocks]
        queries = [f["queries"] + f["queries_stride"] * head.row + 4 * head.member * shape.width for head in heads]
        totals = [[f.variable(f.constant(F32x16, 0.0)) for _ in heads] for _ in blocks]
        with f.range(0, shape.width, step=_WIDTH_STEP) as first:
            for d in range(_WIDTH_STEP):
                columns = [self._load(key + first * row_bytes + d * row_bytes) for key in keys]
                for h, query in enumerate(queries):
                    number = (query + first * 4 + 4 * d).load(F32).splat()
                    for total, column in zip(totals, columns, strict=True):
                        total[h].value = self._path.fma(f, number, column, total[h].value)
        for block, total in zip(blocks, totals, strict=True):
            position = block * BLOCK_POSITIONS
            for maximum, head, score in zip(maxima, heads, total, strict=True):
                scores = self._seen(head, position).select(score.value * f["scale"], f.constant(F32x16, _MASKED))
                (self._weights_of(head) + position * 4).store(scores)
                maximum.value = maximum.value.maximum(scores)

    def _soften(self, head: "_Head", maximum: Value) -> None:
        """Scores to weights e^(score - maximum); the maximum and the sum of weights go to the row's partial."""
        f, shape = self._f, self._shape
        total = f.variable(f.constant(F32x16, 0.0))
        with f.range(0, _blocks(self._counts[head.row])) as block:
            at = self._weights_of(head) + block * (4 * BLOCK_POSITIONS)
            powers = exp(f, self._path, at.load(F32x16) - maximum)
            powers = self._seen(head, block * BLOCK_POSITIONS).select(powers, f.constant(F32x16, 0.0))
            at.store(powers)
            total.value = total.value + powers
        maxima = self._partial(head) + 4 * shape.group * shape.width
        (maxima + 4 * head.member).store(maximum)
        (maxima + 4 * (shape.group + head.member)).store(fold(total.value, Value.__add__))

    def _mix(self, heads: Sequence["_Head"], columns: range, prefetch: bool) -> None:
        """Values weighted and summed over positions, for some columns of `heads`."""
        f, shape = self._f, self._shape
        totals = {head: [f.variable(f.constant(F32x16, 0.0)) for _ in columns] for head in heads}
        with f.range(0, _blocks(self._counts[0])) as block:
            first = block * BLOCK_POSITIONS
            with f.range(first, (first + BLOCK_POSITIONS).minimum(self._counts[0])) as position:
                if prefetch:
                    self._prefetch_next(block, position - first)
                self._mix_position(heads, columns, totals, position)
        for row in {head.row: None for head in heads if head.row > 0}:
            # Not with weight 0 for the rows before: they have never seen this position, be it infinite.
            of_row = [head for head in heads if head.row == row]
            with f.range(self._counts[0], self._counts[row]) as position:
                self._mix_position(of_row, columns, totals, position)
        for head, total in totals.items():
            for column, column_total in zip(columns, total, strict=True):
                (self._partial(head) + 4 * (head.member * shape.width + column)).store(column_total.value)

    def _mix_position(
        self, heads: Sequence["_Head"], columns: range, totals: "dict[_Head, list[Variable]]", position: Value
    ) -> None:
        f, shape = self._f, self._shape
        record = f["records"] + f["stride"] * (position // BLOCK_POSITIONS)
        row = record + shape.keys_bytes + position % BLOCK_POSITIONS * (shape.width * shape.float_bytes)
        loaded = [self._load(row + column * shape.float_bytes) for column in columns]
        for head in heads:
            weight = (self._weights_of(head) + position * 4).load(F32).splat()
            for total, value in zip(totals[head], loaded, strict=True):
                total.value = self._path.fma(f, weight, value, total.value)

    def _prefetch_next(self, block: Value, i: Value) -> None:
        """Ask for position i's sixteenth of the same record of what comes next."""
        share = self._shape.record_bytes // BLOCK_POSITIONS
        for line in range(0, share, CACHE_LINE):
            (self._f["next_records"] + self._f["stride"] * block + i * share + line).prefetch(locality=2)

    def _seen(self, head: "_Head", position: Value) -> Value:
        """Which of the 16 positions from `position` on the head's row may see."""
        return lane_numbers(self._f) < (self._counts[head.row] - position).to(I32).splat()

    def _load(self, at: Value) -> Value:
        return self._path.load_float16(at) if self._shape.float_bytes == 2 else at.load(F32x16)


class _Head(NamedTuple):
    """One query head of one of the rows that share a pass."""

    row: int
    member: int


def _blocks(count: Value) -> Value:
    """Blocks that hold `count` positions."""
    return (count + (BLOCK_POSITIONS - 1)) // BLOCK_POSITIONS


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
