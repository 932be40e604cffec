"""Arithmetic on 16 lanes that kernels share. Every function takes one path for every lane and every length."""

from collections.abc import Callable

from llvmlite import ir

from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import F32, LANES, F32x16, Function, I32x16, Value

_ROUND = 12582912.0  # 1.5 * 2^23: a float32 of this size has no fraction, so adding it rounds to nearest even
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the first has few bits, so k * it is exact
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Cephes `expf` (S. Moshier): relative error below 2^-23 on [-ln2/2, ln2/2]."""


def fold(values: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """The 16 lanes combined into one number, always as the same tree: lanes 8 apart, then 4, 2, 1."""
    width = LANES
    while width > 1:
        width //= 2
        values = combine(values.shuffle(range(width)), values.shuffle(range(width, 2 * width)))
    return values.lane(0)


def magnitude(values: Value) -> Value:
    """Absolute values of float32 lanes."""
    return (values.bitcast(I32x16) & 0x7FFFFFFF).bitcast(F32x16)


def round_to_int(values: Value) -> Value:
    """Float32 lanes below 2^22 in magnitude to the nearest int32, ties to even."""
    return (values + _ROUND).bitcast(I32x16) - 0x4B400000


def exp(f: Function, path: CPUPath, x: Value) -> Value:
    """e^x of 16 lanes, within 2 ulp; below -87 as at -87, above 88 as at 88; NaN stays NaN."""
    x = (x < -87.0).select(f.constant(F32x16, -87.0), x)
    x = (x > 88.0).select(f.constant(F32x16, 88.0), x)
    k = (x * _LOG2_E + _ROUND) - _ROUND
    r = path.fma(f, k, f.constant(F32x16, -_LN2_HIGH), x)
    r = path.fma(f, k, f.constant(F32x16, -_LN2_LOW), r)
    p = f.constant(F32x16, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = path.fma(f, p, r, f.constant(F32x16, coefficient))
    p = path.fma(f, p, r * r, r) + 1.0
    power = ((round_to_int(k) + 127) << 23).bitcast(F32x16)
    return p * power


def square_root(f: Function, x: Value) -> Value:
    """The correctly rounded root of one float32."""
    return f.intrinsic("llvm.sqrt.f32", F32, x)


def lane_numbers(f: Function) -> Value:
    """0, 1, ... 15 as int32."""
    return Value(f.builder, ir.Constant(I32x16, list(range(LANES))))
