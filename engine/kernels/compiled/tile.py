"""The matrix product's inner kernel: one tile of 16 output rows against up to eight activation rows of a panel.

Per 32-block an exact integer dot product, then float sums in block order; with weights that are floats, a float sum in
order within each block too. The same operations for an output element however many rows run beside it.
"""

from llvmlite import ir

from engine.kernels.compiled.dots import Operands
from engine.kernels.compiled.formats import BLOCK, CACHE_LINE, FLOATS, TILE, TileFormat
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    PTR,
    F32x16,
    Function,
    I8x16,
    I8x64,
    I32x16,
    Value,
    Variable,
)
from engine.kernels.compiled.quantize import FIRST_SUMS, PANEL_ROWS, RECORD_BYTES, SCALED_SUMS, SCALES, SUMS

STORE, ADD = 0, 1
"""What happens to the output: replaced, or added to (a residual)."""

_PREFETCH_AHEAD = 20 * 1024
"""Bytes: the tiles of a matrix follow each other, and one row's work per byte is too short to wait for memory."""


def build(module: ir.Module, path: CPUPath, fmt: TileFormat) -> None:
    """Fill `module` with `product` and `row` for one tile format.

    `product(tile, blocks, panel, rows, out, out_stride, mode)`: out[r][0..15] of row r at `out + r * out_stride`.
    `row(tile, blocks, lane, out)`: the weights of one output row as float32, 32 * blocks of them.
    """
    _Product(module, path, fmt)
    if fmt == FLOATS:
        _build_float_row(module)
    else:
        _build_row(module, path, fmt)


class _Product:
    """Builds `product`: one unrolled loop for each number of rows."""

    def __init__(self, module: ir.Module, path: CPUPath, fmt: TileFormat) -> None:
        inputs = [("tile", PTR), ("blocks", I64), ("panel", PTR), ("rows", I64)]
        outputs = [("out", PTR), ("out_stride", I64), ("mode", I64)]
        self._f = Function(module, f"{module.name}.product", inputs + outputs, exported=True)
        self._path = path
        self._fmt = fmt
        self._xs = self._f.scratch(4 * PANEL_ROWS * BLOCK)  # a block of x as floats
        for rows in range(PANEL_ROWS, 0, -1):
            with self._f.when(self._f["rows"].equals(rows)):
                self._multiply(rows)
        self._f.finish()

    def _multiply(self, rows: int) -> None:
        f = self._f
        totals = [f.variable(f.constant(F32x16, 0.0)) for _ in range(rows)]
        if self._fmt == FLOATS:
            self._add_up_floats(totals)
        else:
            # All rows in one pass over the blocks, or as many as leave their totals in registers.
            at_once = max(1, self._path.registers // 2)
            for first in range(0, rows, at_once):
                self._add_up(totals[first : first + at_once], first)
        for row, total in enumerate(totals):
            out = f["out"] + f["out_stride"] * row
            with f.when(f["mode"].equals(ADD)):
                out.store(out.load(F32x16) + total.value)
            with f.when(f["mode"].equals(STORE)):
                out.store(total.value)

    def _add_up_floats(self, totals: list[Variable]) -> None:
        """Weights times the codes of x, one after another, then times their scale."""
        f, path, xs = self._f, self._path, self._xs
        with f.range(0, f["blocks"]) as block:
            record = f["panel"] + block * RECORD_BYTES
            weights = f["tile"] + block * self._fmt.block_code_bytes
            for first in range(0, len(totals) * BLOCK, LANES):
                (xs + 4 * first).store((record + first).load(I8x16).to(I32).to(F32))
            sums = [f.variable(f.constant(F32x16, 0.0)) for _ in totals]
            with f.range(0, BLOCK) as k:
                column = (weights + k * (4 * TILE)).load(F32x16)
                for row, sum_ in enumerate(sums):
                    x = (xs + k * 4 + 4 * BLOCK * row).load(F32)
                    sum_.value = path.fma(f, column, x, sum_.value)
            for row, (total, sum_) in enumerate(zip(totals, sums, strict=True)):
                total.value = path.fma(f, sum_.value, (record + 4 * row + SCALES).load(F32), total.value)

    def _add_up(self, totals: list[Variable], first_row: int) -> None:
        f, path, fmt = self._f, self._path, self._fmt
        tile, blocks = f["tile"], f["blocks"]
        scales, mins = _scale_pointers(fmt, tile, blocks)
        with f.range(0, blocks) as block:
            if first_row == 0:
                self._prefetch(block)
            codes_at = tile + block * fmt.block_code_bytes
            codes = _block_codes(fmt, codes_at)
            record = f["panel"] + block * RECORD_BYTES
            for first in range(0, len(totals), path.rows_together):
                together = totals[first : first + path.rows_together]
                rows = range(first_row + first, first_row + first + len(together))
                for group in range(fmt.groups):
                    vectors = range(group * fmt.group // 4, (group + 1) * fmt.group // 4)
                    of_group = codes[vectors.start : vectors.stop]
                    xs = [record + row * BLOCK for row in rows]
                    x_sums = [_group_sum(fmt, record + 4 * row, group) for row in rows]
                    operands = Operands(vectors, of_group, codes_at, fmt.bits, xs, x_sums)
                    initial = [_initial_sum(f, fmt, record + 4 * row, group) for row in rows]
                    dots = path.dots(f, initial, operands, 2 if len(totals) <= 2 else 1)
                    # Loaded only now: what lives across a loop of `dots` takes registers from it.
                    scale = _load_scales(path, fmt, scales, block, group)
                    minimum = _load_scales(path, fmt, mins, block, group) if fmt.offset is None else None
                    for row, total, dot in zip(rows, together, dots, strict=True):
                        x_scale = (record + (4 * row + SCALES)).load(F32)
                        total.value = path.fma(f, dot.to(F32), scale * x_scale, total.value)
                        if minimum is not None:
                            x_sum = _scaled_sum(fmt, record + 4 * row, x_scale, group)
                            total.value = path.fma(f, minimum, x_sum, total.value)

    def _prefetch(self, block: Value) -> None:
        """Ask for this block's share of the bytes that lie ahead."""
        share = self._fmt.tile_bytes(CACHE_LINE) // CACHE_LINE
        ahead = self._f["tile"] + _PREFETCH_AHEAD + block * share
        for line in range(0, share, CACHE_LINE):
            (ahead + line).prefetch(locality=2)


def _scale_pointers(fmt: TileFormat, tile: Value, blocks: Value) -> tuple[Value, Value]:
    """Where `TileFormat.scales_start` and `mins_start` are in a tile of `blocks`."""
    scales = tile + blocks * fmt.block_code_bytes
    padded = ((blocks * fmt.block_scale_bytes) + (CACHE_LINE - 1)) & ~(CACHE_LINE - 1)
    return scales, scales + padded


def _block_codes(fmt: TileFormat, at: Value) -> list[Value]:
    """The block's codes: eight vectors of 64 bytes."""
    loaded = [(at + 64 * j).load(I8x64) for j in range(fmt.block_code_bytes // 64)]
    if fmt.bits == 8:
        return loaded
    return [v & 15 for v in loaded] + [v >> 4 for v in loaded]


def _load_scales(path: CPUPath, fmt: TileFormat, scales: Value, block: Value, group: int) -> Value:
    """The 16 rows' scales (or mins) of one group, as float32."""
    at = scales + block * fmt.block_scale_bytes + group * (fmt.block_scale_bytes // fmt.groups)
    return path.load_float16(at) if fmt.scale_bytes == 2 else at.load(F32x16)


def _initial_sum(f: Function, fmt: TileFormat, entry: Value, group: int) -> Value:
    """What the integer sum begins with: minus the offset times the sum of x, so that codes need no subtraction."""
    if fmt.offset is None:
        return f.constant(I32x16, 0)
    return -(_group_sum(fmt, entry, group) << (fmt.offset.bit_length() - 1)).splat()


def _group_sum(fmt: TileFormat, entry: Value, group: int) -> Value:
    """The sum of the int8 codes of x in one group."""
    if fmt.groups == 1:
        return (entry + SUMS).load(I32)
    first = (entry + FIRST_SUMS).load(I32)
    return first if group == 0 else (entry + SUMS).load(I32) - first


def _scaled_sum(fmt: TileFormat, entry: Value, x_scale: Value, group: int) -> Value:
    if fmt.groups == 1:
        return (entry + SCALED_SUMS).load(F32)
    return x_scale * _group_sum(fmt, entry, group).to(F32)


def _build_float_row(module: ir.Module) -> None:
    params = [("tile", PTR), ("blocks", I64), ("lane", I64), ("out", PTR)]
    f = Function(module, f"{module.name}.row", params, exported=True)
    with f.range(0, f["blocks"] * BLOCK) as k:
        (f["out"] + k * 4).store((f["tile"] + (k * TILE + f["lane"]) * 4).load(F32))
    f.finish()


def _build_row(module: ir.Module, path: CPUPath, fmt: TileFormat) -> None:
    params = [("tile", PTR), ("blocks", I64), ("lane", I64), ("out", PTR)]
    f = Function(module, f"{module.name}.row", params, exported=True)
    tile, blocks, lane = f["tile"], f["blocks"], f["lane"] * 4
    scales, mins = _scale_pointers(fmt, tile, blocks)
    column = f.scratch(64)  # scales of 16 rows as float32, to pick this row's
    with f.range(0, blocks) as block:
        codes = tile + block * fmt.block_code_bytes + lane
        out = f["out"] + block * (4 * BLOCK)
        for group in range(fmt.groups):
            column.store(_load_scales(path, fmt, scales, block, group))
            scale = (column + lane).load(F32)
            if fmt.offset is None:
                column.store(_load_scales(path, fmt, mins, block, group))
                minimum = (column + lane).load(F32)
            for k in range(group * fmt.group, (group + 1) * fmt.group):
                code = (codes + _code_byte(fmt, k)).load(I8).zero_extend(I32)
                if fmt.bits == 4:
                    code = code & 15 if k < BLOCK // 2 else code >> 4
                shifted = code - fmt.offset if fmt.offset is not None else code
                weight = shifted.to(F32) * scale
                (out + 4 * k).store(weight if fmt.offset is not None else weight + minimum)
    f.finish()


def _code_byte(fmt: TileFormat, k: int) -> int:
    """Offset in a block of the byte that holds the first row's code of k."""
    j, byte = divmod(k, 4)
    return 64 * (j % (fmt.block_code_bytes // 64)) + byte
