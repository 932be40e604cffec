"""Attention of query heads that share one key/value head, over one partition of at most 256 positions.

The cache is read once for all heads of the group. It comes in records of 16 positions: the keys turned, [D][16], so
that 16 scores grow without a sum across lanes, then the values, [16][D]. Whatever else runs, a row's scores are sums
over D in order, its softmax sums 16 lanes that a fixed tree folds, its output is a sum over positions in order.
"""

from dataclasses import dataclass

from llvmlite import ir

from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import F32, I64, LANES, PTR, F32x16, Function, I32x16, Value, Variable
from engine.kernels.compiled.vectors import exp, fold, lane_numbers

PARTITION = 256
"""Positions whose attention is reduced together, counted from position 0 of the slot."""
BLOCK_POSITIONS = LANES
_HEADS_AT_ONCE = 4
_VECTORS_AT_ONCE = 4
_MASKED = -3.0e38


@dataclass(frozen=True)
class HeadShape:
    """What attention kernels are compiled for: `group` query heads per key/value head, `width` elements a head
    (a multiple of 16; narrower heads are padded with zeros), `float_bytes` of one cached number."""

    group: int
    width: int
    float_bytes: int

    @property
    def name(self) -> str:
        return f"heads{self.group}_width{self.width}_float{8 * self.float_bytes}"

    @property
    def keys_bytes(self) -> int:
        """Bytes of 16 positions' keys, or values."""
        return BLOCK_POSITIONS * self.width * self.float_bytes

    @property
    def record_bytes(self) -> int:
        return 2 * self.keys_bytes

    @property
    def partial_bytes(self) -> int:
        """One partition's result: per head the unnormalised output, then all maxima, then all sums."""
        return 4 * self.group * (self.width + 2)


def build(module: ir.Module, path: CPUPath, shape: HeadShape) -> None:
    """Fill `module` with `attend` and `append` for one head shape.

    `attend(queries, records, stride, count, scale, partial)`: positions 0..count-1 of the partition whose 16-position
    records begin at `records`, `stride` bytes apart; queries float32 [group][width].
    `append(keys, values, record, lane)`: one position's key and value into its record.
    """
    _build_append(module, path, shape)
    f = Function(
        module,
        f"{module.name}.attend",
        [("queries", PTR), ("records", PTR), ("stride", I64), ("count", I64), ("scale", F32), ("partial", PTR)],
        exported=True,
    )
    weights = f.scratch(4 * PARTITION * shape.group)
    blocks = (f["count"] + (BLOCK_POSITIONS - 1)) // BLOCK_POSITIONS
    for first in range(0, shape.group, _HEADS_AT_ONCE):
        heads = range(first, min(first + _HEADS_AT_ONCE, shape.group))
        maxima = [f.variable(f.constant(F32x16, _MASKED)) for _ in heads]
        pairs = blocks // 2
        with f.range(0, pairs) as pair:
            _scores(f, path, shape, heads, maxima, weights, pair * 2, n_blocks=2)
        with f.when((blocks % 2).equals(1)):
            _scores(f, path, shape, heads, maxima, weights, blocks - 1, n_blocks=1)
        for head, maximum in zip(heads, maxima, strict=True):
            _softmax(f, path, shape, head, fold(maximum.value, Value.maximum), weights, blocks)
        for column in range(0, shape.width, _VECTORS_AT_ONCE * LANES):
            columns = range(column, min(column + _VECTORS_AT_ONCE * LANES, shape.width), LANES)
            _mix(f, path, shape, heads, columns, weights)
    f.finish()


def _weights_of(weights: Value, head: int) -> Value:
    return weights + head * (4 * PARTITION)


def _load(path: CPUPath, shape: HeadShape, at: Value) -> Value:
    return path.load_float16(at) if shape.float_bytes == 2 else at.load(F32x16)


def _scores(
    f: Function,
    path: CPUPath,
    shape: HeadShape,
    heads: range,
    maxima: list[Variable],
    weights: Value,
    block: Value,
    n_blocks: int,
) -> None:
    """The scores of `heads` at the 16 * n_blocks positions from `block` on, into `weights`."""
    row_bytes = BLOCK_POSITIONS * shape.float_bytes
    keys = [f["records"] + f["stride"] * (block + i) for i in range(n_blocks)]
    totals = [[f.variable(f.constant(F32x16, 0.0)) for _ in heads] for _ in keys]
    with f.range(0, shape.width, step=8) as first:
        for d in range(8):
            columns = [_load(path, shape, key + first * row_bytes + d * row_bytes) for key in keys]
            for h, head in enumerate(heads):
                query = (f["queries"] + first * 4 + 4 * (head * shape.width + d)).load(F32).splat()
                for total, column in zip(totals, columns, strict=True):
                    total[h].value = path.fma(f, query, column, total[h].value)
    for i, total in enumerate(totals):
        position = (block + i) * BLOCK_POSITIONS
        for h, head in enumerate(heads):
            scores = _within(f, position).select(total[h].value * f["scale"], f.constant(F32x16, _MASKED))
            (_weights_of(weights, head) + position * 4).store(scores)
            maxima[h].value = maxima[h].value.maximum(scores)


def _within(f: Function, position: Value) -> Value:
    """Which of the 16 positions from `position` on exist."""
    return lane_numbers(f) < (f["count"] - position).to(I32x16.element).splat()


def _softmax(
    f: Function, path: CPUPath, shape: HeadShape, head: int, maximum: Value, weights: Value, blocks: Value
) -> None:
    """Scores to weights e^(score - maximum); the maximum and the sum of weights go to `partial`."""
    total = f.variable(f.constant(F32x16, 0.0))
    with f.range(0, blocks) as block:
        at = _weights_of(weights, head) + block * (4 * BLOCK_POSITIONS)
        powers = exp(f, path, at.load(F32x16) - maximum.splat())
        powers = _within(f, block * BLOCK_POSITIONS).select(powers, f.constant(F32x16, 0.0))
        at.store(powers)
        total.value = total.value + powers
    outputs_bytes = 4 * shape.group * shape.width
    (f["partial"] + (outputs_bytes + 4 * head)).store(maximum)
    (f["partial"] + (outputs_bytes + 4 * (shape.group + head))).store(fold(total.value, Value.__add__))


def _mix(f: Function, path: CPUPath, shape: HeadShape, heads: range, columns: range, weights: Value) -> None:
    """Values weighted and summed over positions, for some columns of `heads`."""
    totals = [[f.variable(f.constant(F32x16, 0.0)) for _ in columns] for _ in heads]
    blocks = (f["count"] + (BLOCK_POSITIONS - 1)) // BLOCK_POSITIONS
    with f.range(0, blocks) as block:
        values = f["records"] + f["stride"] * block + shape.keys_bytes
        first = block * BLOCK_POSITIONS
        with f.range(0, (f["count"] - first).minimum(f.constant(I64, BLOCK_POSITIONS))) as i:
            row = values + i * (shape.width * shape.float_bytes)
            loaded = [_load(path, shape, row + column * shape.float_bytes) for column in columns]
            for head, total in zip(heads, totals, strict=True):
                weight = (_weights_of(weights, head) + (first + i) * 4).load(F32).splat()
                for column_total, value in zip(total, loaded, strict=True):
                    column_total.value = path.fma(f, weight, value, column_total.value)
    for head, total in zip(heads, totals, strict=True):
        for column, column_total in zip(columns, total, strict=True):
            (f["partial"] + 4 * (head * shape.width + column)).store(column_total.value)


def _build_append(module: ir.Module, path: CPUPath, shape: HeadShape) -> None:
    f = Function(
        module,
        f"{module.name}.append",
        [("keys", PTR), ("values", PTR), ("record", PTR), ("lane", I64)],
        exported=True,
    )
    size = shape.float_bytes
    values_row = f["record"] + shape.keys_bytes + f["lane"] * (shape.width * size)
    for column in range(0, shape.width, LANES):
        key, value = (f[name] + 4 * column for name in ("keys", "values"))
        key_bits, value_bits = (_to_cached(f, path, shape, at.load(F32x16)) for at in (key, value))
        (values_row + column * size).store(value_bits)
        for i in range(LANES):
            (f["record"] + (column + i) * (BLOCK_POSITIONS * size) + f["lane"] * size).store(key_bits.lane(i))
    f.finish()


def _to_cached(f: Function, path: CPUPath, shape: HeadShape, values: Value) -> Value:
    return path.to_float16(f, values) if shape.float_bytes == 2 else values.bitcast(I32x16)
