"""Activations in panels: int8 codes of eight rows, block by block, beside their scales and sums.

A record is one 32-block of eight rows: codes int8 [8][32], then per row the scale (float32), the sum of codes times
the scale (float32), the sum of the codes (int32) and the sum of the first 16 codes (int32). A panel is its blocks'
records in order; a row's quantization depends on that row's 32 values alone.
"""

from collections.abc import Sequence

from engine.kernels.compiled.lang import F32, I8, LANES, F32x16, Function, I32x16, Value
from engine.kernels.compiled.vectors import fold, magnitude, round_to_int

PANEL_ROWS = 8
BLOCK = 32
SCALES = PANEL_ROWS * BLOCK
SCALED_SUMS = SCALES + 4 * PANEL_ROWS
SUMS = SCALED_SUMS + 4 * PANEL_ROWS
FIRST_SUMS = SUMS + 4 * PANEL_ROWS
RECORD_BYTES = FIRST_SUMS + 4 * PANEL_ROWS


def quantize_block(f: Function, halves: Sequence[Value], record: Value, row: Value) -> None:
    """Write 32 floats, 16 and 16, as row `row` (0..7) of `record`: scale = the largest magnitude / 127."""
    low, high = (magnitude(half).bitcast(I32x16) for half in halves)
    # As integers, magnitudes have the floats' order, infinities and NaNs being the largest: these reach the scale, and
    # through it every output of this row.
    largest = fold(low.maximum(high), Value.maximum).bitcast(F32)
    inverse = (largest > 0.0).select(f.constant(F32, 127.0) / largest, f.constant(F32, 0.0))
    scale = largest / 127.0
    codes = record + row * BLOCK
    sums = []
    for half, values in enumerate(halves):
        rounded = round_to_int(values * inverse)
        (codes + half * LANES).store(rounded.to(I8))
        sums.append(fold(rounded, Value.__add__))
    total = sums[0] + sums[1]
    entry = record + row * 4
    (entry + SCALES).store(scale)
    (entry + SCALED_SUMS).store(scale * total.to(F32))
    (entry + SUMS).store(total)
    (entry + FIRST_SUMS).store(sums[0])


def quantize_row(f: Function, values: Value, panel: Value, row: Value, blocks: Value) -> None:
    """Write 32 * `blocks` floats at `values` as row `row` of the panel at `panel`."""
    with f.range(0, blocks) as block:
        source = values + block * (4 * BLOCK)
        halves = [source.load(F32x16), (source + 4 * LANES).load(F32x16)]
        quantize_block(f, halves, panel + block * RECORD_BYTES, row)
