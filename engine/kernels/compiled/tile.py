"""The matrix product's inner kernel: one tile of 16 output rows against up to eight activation rows of a panel.

Per 32-block an exact integer dot product, then float sums in block order: the same operations for an output element
however many rows run beside it.
"""

from llvmlite import ir

from engine.kernels.compiled.formats import BLOCK, CACHE_LINE, TileFormat
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import F32, I32, I64, PTR, F32x16, Function, I8x64, I32x16, Value, I8
from engine.kernels.compiled.quantize import FIRST_SUMS, PANEL_ROWS, RECORD_BYTES, SCALED_SUMS, SCALES, SUMS

STORE, ADD = 0, 1
"""What happens to the output: replaced, or added to (a residual)."""


def build(module: ir.Module, path: CPUPath, fmt: TileFormat) -> None:
    """Fill `module` with `product` and `row` for one tile format.

    `product(tile, blocks, panel, rows, out, out_stride, mode)`: out[r][0..15] of row r at `out + r * out_stride`.
    `row(tile, blocks, lane, out)`: the weights of one output row as float32, 32 * blocks of them.
    """
    f = Function(
        module,
        f"{module.name}.product",
        [
            ("tile", PTR),
            ("blocks", I64),
            ("panel", PTR),
            ("rows", I64),
            ("out", PTR),
            ("out_stride", I64),
            ("mode", I64),
        ],
        exported=True,
    )
    for rows in range(PANEL_ROWS, 0, -1):
        with f.when(f["rows"].equals(rows)):
            _product_of_rows(f, path, fmt, rows)
    f.finish()
    _build_row(module, path, fmt)


def _product_of_rows(f: Function, path: CPUPath, fmt: TileFormat, rows: int) -> None:
    totals = [f.variable(f.constant(F32x16, 0.0)) for _ in range(rows)]
    tile, blocks = f["tile"], f["blocks"]
    scales, mins = _scale_pointers(fmt, tile, blocks)
    with f.range(0, blocks) as block:
        codes = _block_codes(f, fmt, tile + block * fmt.block_code_bytes)
        record = f["panel"] + block * RECORD_BYTES
        group_scales, group_mins = [], []
        for group in range(fmt.groups):
            at = block * fmt.block_scale_bytes + group * (fmt.block_scale_bytes // fmt.groups)
            group_scales.append(_load_scales(path, fmt, scales + at))
            if fmt.offset is None:
                group_mins.append(_load_scales(path, fmt, mins + at))
        for row, total in enumerate(totals):
            entry = record + 4 * row
            x_scale = (entry + SCALES).load(F32)
            for group in range(fmt.groups):
                vectors = codes[group * len(codes) // fmt.groups : (group + 1) * len(codes) // fmt.groups]
                first = group * len(vectors)
                xs = [(record + row * BLOCK + 4 * (first + j)).load(I32) for j in range(len(vectors))]
                dot = _dot(
                    f, path, fmt, vectors, xs, _initial_sum(f, fmt, entry, group), n_chains=2 if rows <= 2 else 1
                )
                product_scale = group_scales[group] * x_scale
                total.value = path.fma(f, dot.to(F32), product_scale, total.value)
                if fmt.offset is None:
                    scaled_sum = _scaled_sum(f, fmt, entry, x_scale, group)
                    total.value = path.fma(f, group_mins[group], scaled_sum, total.value)
    for row, total in enumerate(totals):
        out = f["out"] + f["out_stride"] * row
        with f.when(f["mode"].equals(ADD)):
            out.store(out.load(F32x16) + total.value)
        with f.when(f["mode"].equals(STORE)):
            out.store(total.value)


def _scale_pointers(fmt: TileFormat, tile: Value, blocks: Value) -> tuple[Value, Value]:
    """Where `TileFormat.scales_start` and `mins_start` are in a tile of `blocks`."""
    scales = tile + blocks * fmt.block_code_bytes
    padded = ((blocks * fmt.block_scale_bytes) + (CACHE_LINE - 1)) & ~(CACHE_LINE - 1)
    return scales, scales + padded


def _block_codes(f: Function, fmt: TileFormat, at: Value) -> list[Value]:
    """The block's codes: eight vectors of 64 bytes."""
    loaded = [(at + 64 * j).load(I8x64) for j in range(fmt.block_code_bytes // 64)]
    if fmt.bits == 8:
        return loaded
    return [v & 15 for v in loaded] + [v >> 4 for v in loaded]


def _load_scales(path: CPUPath, fmt: TileFormat, at: Value) -> Value:
    return path.load_float16(at) if fmt.scale_bytes == 2 else at.load(F32x16)


def _dot(
    f: Function, path: CPUPath, fmt: TileFormat, codes: list[Value], xs: list[Value], initial: Value, n_chains: int
) -> Value:
    """initial + the sum of codes * x; few rows leave the CPU idle unless the sum is split in two chains."""
    chains = [initial] + [f.constant(I32x16, 0)] * (n_chains - 1)
    for j, (code, x) in enumerate(zip(codes, xs, strict=True)):
        chains[j % n_chains] = path.dot4(f, chains[j % n_chains], code, x, fmt.bits)
    return chains[0] if n_chains == 1 else chains[0] + chains[1]


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


def _scaled_sum(f: Function, fmt: TileFormat, entry: Value, x_scale: Value, group: int) -> Value:
    if fmt.groups == 1:
        return (entry + SCALED_SUMS).load(F32)
    return x_scale * _group_sum(fmt, entry, group).to(F32)


def _build_row(module: ir.Module, path: CPUPath, fmt: TileFormat) -> None:
    f = Function(
        module,
        f"{module.name}.row",
        [("tile", PTR), ("blocks", I64), ("lane", I64), ("out", PTR)],
        exported=True,
    )
    tile, blocks, lane = f["tile"], f["blocks"], f["lane"]
    scales, mins = _scale_pointers(fmt, tile, blocks)
    column = f.scratch(64)  # scales of 16 rows as float32, to pick this row's
    with f.range(0, blocks) as block:
        codes = tile + block * fmt.block_code_bytes + lane * 4
        for group in range(fmt.groups):
            at = block * fmt.block_scale_bytes + group * (fmt.block_scale_bytes // fmt.groups)
            column.store(_load_scales(path, fmt, scales + at))
            scale = (column + lane * 4).load(F32)
            if fmt.offset is None:
                column.store(_load_scales(path, fmt, mins + at))
                minimum = (column + lane * 4).load(F32)
            for k in range(group * fmt.group, (group + 1) * fmt.group):
                code = (codes + _code_byte(fmt, k)).load(I8).zero_extend(I32)
                if fmt.bits == 4:
                    code = code & 15 if k < BLOCK // 2 else code >> 4
                if fmt.offset is None:
                    weight = code.to(F32) * scale + minimum
                else:
                    weight = (code - fmt.offset).to(F32) * scale
                (f["out"] + block * (4 * BLOCK) + 4 * k).store(weight)
    f.finish()


def _code_byte(fmt: TileFormat, k: int) -> int:
    """Offset in a block of the byte that holds the first row's code of k."""
    j, byte = divmod(k, 4)
    return 64 * (j % (fmt.block_code_bytes // 64)) + byte
