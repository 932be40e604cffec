"""Exact integer dot products of codes and activations, once for each instruction that a CPU may have for them.

All compute the same integers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from engine.kernels.compiled.lang import I8, I32, Function, I16x16, I32x16, Value, vector

I32x8, I32x4, I8x16, I8x32 = vector(I32, 8), vector(I32, 4), vector(I8, 16), vector(I8, 32)


@dataclass(frozen=True, slots=True)
class Operands:
    """What is multiplied in one group of a 32-block: codes of 16 weight rows with int8 of some activation rows.

    A block's codes are eight vectors, uint8 x 64, each four codes of every weight row; `vectors` are those of the
    group, `codes` what they hold. They lie at `block` as `formats` says, `bits` a code; `rows` point to the block's 32
    int8 of each activation row.
    """

    vectors: range
    codes: list[Value]
    block: Value
    bits: int
    rows: list[Value]


Dot4 = Callable[[Function, Value, Value, Value, int], Value]
"""(function, total int32 x 16, codes uint8 x 64, x int32 of four int8, bits of a code) -> total plus, for each of 16
rows, the sum of its four code * x."""

Dots = Callable[[Function, list[Value], Operands, int], list[Value]]
"""(function, totals int32 x 16 of each activation row, operands, chains) -> totals plus the sums of a group's products;
few rows leave the CPU idle unless each sum is split in `chains`."""


def _by_steps_of_four(dot4: Dot4) -> Dots:
    def dots(f: Function, totals: list[Value], operands: Operands, chains: int) -> list[Value]:
        sums = [[total] + [f.constant(I32x16, 0)] * (chains - 1) for total in totals]
        for row, parts in zip(operands.rows, sums, strict=True):
            for i, (j, codes) in enumerate(zip(operands.vectors, operands.codes, strict=True)):
                x = (row + 4 * j).load(I32)
                parts[i % chains] = dot4(f, parts[i % chains], codes, x, operands.bits)
        return [functools.reduce(Value.__add__, parts) for parts in sums]

    return dots


def _dot4_vpdpbusd_512(f: Function, total: Value, codes: Value, x: Value, _bits: int) -> Value:
    """AVX512-VNNI: one instruction, 64 products."""
    return f.intrinsic("llvm.x86.avx512.vpdpbusd.512", I32x16, total, codes.bitcast(I32x16), x.splat())


def _dot4_vpdpbusd_256(f: Function, total: Value, codes: Value, x: Value, _bits: int) -> Value:
    """AVX-VNNI: the same in two halves of eight rows."""
    name, words, x8 = "llvm.x86.avx512.vpdpbusd.256", codes.bitcast(I32x16), x.splat(8)
    low, high = (
        f.intrinsic(name, I32x8, total.shuffle(half), words.shuffle(half), x8) for half in (range(8), range(8, 16))
    )
    return low.concatenate(high)


def pmaddubsw(f: Function, totals: list[Value], operands: Operands, _chains: int) -> list[Value]:
    """AVX2: sums of two products in 16 bits. They saturate unless codes have four bits, so eight bits take two turns.

    The largest sum over eight vectors is 8 * 2 * 15 * 127 = 30480: only after the last do sums have to be widened.
    """
    assert len(operands.vectors) <= 8
    sums_of = _unrolled_sums if len(operands.rows) == 1 else _looped_sums
    weights = (1,) if operands.bits == 4 else (1, 16)
    for nibble, weight in enumerate(weights):
        sums = sums_of(f, operands, nibble)
        times = f.constant(I16x16, weight)
        wide = [[f.intrinsic("llvm.x86.avx2.pmadd.wd", I32x8, half, times) for half in halves] for halves in sums]
        totals = [total + low.concatenate(high) for total, (low, high) in zip(totals, wide, strict=True)]
    return totals


def _unrolled_sums(f: Function, operands: Operands, nibble: int) -> list[list[Value]]:
    """Per activation row the sums in 16 bits, of eight weight rows and eight; of eight-bit codes, those of a nibble."""
    sums = [[f.constant(I16x16, 0)] * 2 for _ in operands.rows]
    for j, whole in zip(operands.vectors, operands.codes, strict=True):
        codes = whole if operands.bits == 4 else (whole & 15, whole >> 4)[nibble]
        halves = [codes.shuffle(range(32)), codes.shuffle(range(32, 64))]
        sums = [_add_products(f, of_row, halves, row + 4 * j) for of_row, row in zip(sums, operands.rows, strict=True)]
    return sums


def _looped_sums(f: Function, operands: Operands, nibble: int) -> list[list[Value]]:
    """The same by a loop that runs: unrolled, LLVM makes of it an order of sums that does not fit the registers."""
    variables = [[f.variable(f.constant(I16x16, 0)) for _ in range(2)] for _ in operands.rows]
    first, last = operands.vectors[0], operands.vectors[-1]
    if operands.bits == 8:
        turns = [(0, nibble)]
    else:  # vectors j and j + 4 share their bytes
        turns = [(4 * high, high) for high in range(first // 4, last // 4 + 1)]
        first, last = 0, 3
    with f.range(first, last + 1) as index:
        shared = [(operands.block + index * 64 + half).load(I8x32) for half in (0, 32)]
        for ahead, high in turns:
            codes = [half >> 4 if high else half & 15 for half in shared]
            for row, sums in zip(operands.rows, variables, strict=True):
                values = _add_products(f, [sum_.value for sum_ in sums], codes, row + (index + ahead) * 4)
                for sum_, value in zip(sums, values, strict=True):
                    sum_.value = value
    return [[sum_.value for sum_ in sums] for sums in variables]


def _add_products(f: Function, sums: list[Value], codes: list[Value], x: Value) -> list[Value]:
    """The sums, each int16 x 16, plus those of two code * x, where four int8 are at `x`."""
    x8 = x.load(I32).splat(8).bitcast(I8x32)
    pairs = [f.intrinsic("llvm.x86.avx2.pmadd.ub.sw", I16x16, half, x8) for half in codes]
    return [sum_ + pair for sum_, pair in zip(sums, pairs, strict=True)]


def _dot4_sdot(f: Function, total: Value, codes: Value, x: Value, bits: int) -> Value:
    """NEON dot product, which is signed: an 8-bit code c becomes c - 128, and 128 x is added back as 64 x + 64 x."""
    name, x16 = "llvm.aarch64.neon.sdot.v4i32.v16i8", x.splat(4).bitcast(I8x16)
    parts = []
    for quarter in range(4):
        part = total.shuffle(range(4 * quarter, 4 * quarter + 4))
        signed = codes.shuffle(range(16 * quarter, 16 * quarter + 16))
        if bits == 8:
            signed = signed ^ 0x80
            offset = f.constant(I8x16, 64)
            part = f.intrinsic(name, I32x4, f.intrinsic(name, I32x4, part, offset, x16), offset, x16)
        parts.append(f.intrinsic(name, I32x4, part, signed, x16))
    return parts[0].concatenate(parts[1]).concatenate(parts[2].concatenate(parts[3]))


def _dot4_plain(_f: Function, total: Value, codes: Value, x: Value, _bits: int) -> Value:
    """Shifts and multiplications any CPU has."""
    words = codes.bitcast(I32x16)
    for byte in range(4):
        code = (words >> (8 * byte)) & 0xFF
        total = total + code * (x << (24 - 8 * byte)).arithmetic_shift_right(24).splat()
    return total


vpdpbusd_512 = _by_steps_of_four(_dot4_vpdpbusd_512)
vpdpbusd_256 = _by_steps_of_four(_dot4_vpdpbusd_256)
sdot = _by_steps_of_four(_dot4_sdot)
plain = _by_steps_of_four(_dot4_plain)
