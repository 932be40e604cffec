"""Exact integer dot products of codes and activations, once for each instruction that a CPU may have for them.

All compute the same integers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from engine.kernels.compiled.lang import I1, I8, I32, Function, I16x16, I32x16, Value, vector

_PMADDUBSW = "llvm.x86.avx2.pmadd.ub.sw"
I32x8, I32x4, I8x16, I8x32 = vector(I32, 8), vector(I32, 4), vector(I8, 16), vector(I8, 32)


@dataclass(frozen=True, slots=True)
class Operands:
    """What is multiplied in one group of a 32-block: codes of 16 weight rows with int8 of some activation rows.

    A block's codes are eight vectors, uint8 x 64, each four codes of every weight row; `vectors` are those of the
    group, `codes` what they hold. They lie at `block` as `formats` says, `bits` a code; `rows` point to the block's 32
    int8 of each activation row, and `x_sums` are the sums of those in the group.
    """

    vectors: range
    codes: list[Value]
    block: Value
    bits: int
    rows: list[Value]
    x_sums: list[Value]


Dot4 = Callable[[Function, Value, Value, Value, int], Value]
"""(function, total int32 x 16, codes uint8 x 64, x int32 of four int8, bits of a code) -> total plus, for each of 16
rows, the sum of its four code * x."""

Dots = Callable[[Function, list[Value], Operands, int], list[Value]]
"""(function, totals int32 x 16 of each activation row, operands, chains) -> totals plus the sums of a group's products;
few rows leave the CPU idle unless each sum is split in `chains`."""


def _by_steps_of_four(dot4: Dot4) -> Dots:
    def dots(f: Function, totals: list[Value], operands: Operands, chains: int) -> list[Value]:
        sums = [[total] + [f.constant(I32x16, 0)] * (chains - 1) for total in totals]
        for i, (j, codes) in enumerate(zip(operands.vectors, operands.codes, strict=True)):
            for row, parts in zip(operands.rows, sums, strict=True):
                x = (row + 4 * j).load(I32)
                parts[i % chains] = dot4(f, parts[i % chains], codes, x, operands.bits)
        return [functools.reduce(Value.__add__, parts) for parts in sums]

    return dots


def _dot4_vpdpbusd_512(f: Function, total: Value, codes: Value, x: Value, _bits: int) -> Value:
    """AVX512-VNNI: one instruction, 64 products."""
    return f.intrinsic("llvm.x86.avx512.vpdpbusd.512", I32x16, total, codes.bitcast(I32x16), x.splat())


Step = Callable[[Function, int, list[Value], list[Value], Value], list[Value]]
"""(function, bits of a code, sums of the first eight weight rows and of the others, codes uint8 x 32 of either, x)
-> sums plus products; x points to four int8."""


def _sums_in_halves(f: Function, sums: list[list[Value]], operands: Operands, step: Step) -> list[list[Value]]:
    """`sums` of each activation row, of eight weight rows and of the others, plus what `step` adds for all vectors."""
    return (_unrolled_sums if len(sums) == 1 else _looped_sums)(f, sums, operands, step)


def _unrolled_sums(f: Function, sums: list[list[Value]], operands: Operands, step: Step) -> list[list[Value]]:
    sums = [list(of_row) for of_row in sums]
    for j, codes in zip(operands.vectors, operands.codes, strict=True):
        halves = [codes.shuffle(range(32)), codes.shuffle(range(32, 64))]
        for row, of_row in zip(operands.rows, sums, strict=True):
            of_row[:] = step(f, operands.bits, of_row, halves, row + 4 * j)
    return sums


def _looped_sums(f: Function, sums: list[list[Value]], operands: Operands, step: Step) -> list[list[Value]]:
    """The same by a loop that runs: unrolled, LLVM makes of it an order of sums that does not fit the registers."""
    variables = [[f.variable(half) for half in of_row] for of_row in sums]
    first, last = operands.vectors[0], operands.vectors[-1]
    halves_of_bytes = range(1)
    if operands.bits == 4:  # vectors j and j + 4 share their bytes
        halves_of_bytes = range(first // 4, last // 4 + 1)
        first, last = 0, 3
    with f.range(first, last + 1) as j:
        loaded = [(operands.block + j * 64 + half).load(I8x32) for half in (0, 32)]
        for high in halves_of_bytes:
            codes = [half >> 4 if high else half & 15 for half in loaded] if operands.bits == 4 else loaded
            for row, of_row in zip(operands.rows, variables, strict=True):
                x = row + (j + 4 * high) * 4
                values = step(f, operands.bits, [half.value for half in of_row], codes, x)
                for half, value in zip(of_row, values, strict=True):
                    half.value = value
    return [[half.value for half in of_row] for of_row in variables]


def vpdpbusd_256(f: Function, totals: list[Value], operands: Operands, _chains: int) -> list[Value]:
    """AVX-VNNI: one instruction, 32 products, of eight weight rows."""
    halves = [[total.shuffle(range(8)), total.shuffle(range(8, 16))] for total in totals]
    return [low.concatenate(high) for low, high in _sums_in_halves(f, halves, operands, _with_vpdpbusd)]


def _with_vpdpbusd(f: Function, _bits: int, sums: list[Value], codes: list[Value], x: Value) -> list[Value]:
    name, x8 = "llvm.x86.avx512.vpdpbusd.256", x.load(I32).splat(8)
    return [f.intrinsic(name, I32x8, sum_, half.bitcast(I32x8), x8) for sum_, half in zip(sums, codes, strict=True)]


def pmaddubsw(f: Function, totals: list[Value], operands: Operands, _chains: int) -> list[Value]:
    """AVX2: sums of two products in 16 bits, which are exact as long as they do not saturate.

    Codes of four bits: over eight vectors at most 8 * 2 * 15 * 127 = 30480, so only the last sum has to be widened.
    Of eight bits: a code less 128, its sign given to x, makes 2 * 128 * 127 = 32512, widened each time.
    """
    assert len(operands.vectors) <= 8
    zero = f.constant(I16x16 if operands.bits == 4 else I32x8, 0)
    sums = _sums_in_halves(f, [[zero, zero] for _ in totals], operands, _with_pmaddubsw)
    if operands.bits == 4:
        sums = [[_widened(f, half) for half in halves] for halves in sums]
    else:
        totals = [total + (x_sum << 7) for total, x_sum in zip(totals, operands.x_sums, strict=True)]
    return [total + low.concatenate(high) for total, (low, high) in zip(totals, sums, strict=True)]


def _with_pmaddubsw(f: Function, bits: int, sums: list[Value], codes: list[Value], x: Value) -> list[Value]:
    """`sums` plus code * x for the four int8 at `x`, of eight-bit codes (code - 128) * x."""
    x8 = x.load(I32).splat(8).bitcast(I8x32)
    if bits == 4:
        return [sum_ + f.intrinsic(_PMADDUBSW, I16x16, half, x8) for sum_, half in zip(sums, codes, strict=True)]
    added = []
    for sum_, half in zip(sums, codes, strict=True):
        signed = half ^ 0x80
        size = f.intrinsic("llvm.abs.v32i8", I8x32, signed, f.constant(I1, 0))
        pairs = f.intrinsic(_PMADDUBSW, I16x16, size, f.intrinsic("llvm.x86.avx2.psign.b", I8x32, x8, signed))
        added.append(sum_ + _widened(f, pairs))
    return added


def _widened(f: Function, pairs: Value) -> Value:
    """Two neighbouring int16 added up to an int32."""
    return f.intrinsic("llvm.x86.avx2.pmadd.wd", I32x8, pairs, f.constant(I16x16, 1))


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
sdot = _by_steps_of_four(_dot4_sdot)
plain = _by_steps_of_four(_dot4_plain)
