"""What the sampler does to every entry of a vocabulary, compiled: the largest logit, weights, and the draw.

Plain float64 arithmetic, nothing fused and nothing reordered: the same scores, temperature and uniform number choose
the same token on every CPU.
"""

import ctypes
import functools
import math
from typing import Protocol

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from engine.kernels.compiled import argmax, isa
from engine.kernels.compiled.jit import Library
from engine.kernels.compiled.lang import F32, F64, I64, PTR, Function, Value, vector

CDF_BLOCK = 256
"""Weights are added up in blocks of so many, then the blocks in order: a draw looks closely at one block only."""

Scores = NDArray[np.float32] | NDArray[np.float64]

_LANES = 8
_F64x8, _I64x8 = vector(F64, _LANES), vector(I64, _LANES)
_ROUND = 6755399441055744.0  # 1.5 * 2^52: a float64 of this size has no fraction, so adding it rounds to nearest even
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # fdlibm's: k * the first is exact
_LOWEST = -708.0  # e^x is a normal float64 down to here, and weighs nothing below
_DEGREE = 13  # of the Taylor polynomial, which leaves 4e-18 on [-ln2/2, ln2/2]


def largest(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Per row of `logits` [n, V] the index of the largest, the lowest among equals; -1 where one is not finite."""
    n, width = logits.shape
    assert logits.strides[1] == logits.itemsize
    out = np.empty(n, np.int64)
    _kernels().argmax(logits.ctypes.data, n, logits.strides[0], width, out.ctypes.data)
    return out


def weights(scores: Scores, maximum: float, temperature: float) -> NDArray[np.float64]:
    """e^((score - maximum) / temperature) of each of `scores` [C], none of them above `maximum`; 0 where it is -inf."""
    out = np.empty(len(scores))
    kernel = _kernels().weights[scores.dtype.itemsize]
    kernel(_contiguous(scores), len(scores), maximum, temperature, out.ctypes.data)
    return out


def draw(scores: Scores, maximum: float, temperature: float, uniform: float) -> int:
    """As `pick` of the `weights`, without keeping them."""
    sums = np.empty(-(-len(scores) // CDF_BLOCK))
    kernel = _kernels().draw[scores.dtype.itemsize]
    return int(kernel(_contiguous(scores), len(scores), maximum, temperature, uniform, sums.ctypes.data))


def pick(weights: NDArray[np.float64], uniform: float) -> int:
    """The first index at which the running sum of `weights` exceeds `uniform` in [0, 1) times the whole sum.

    Sums are taken of each block of 256 (eight running sums, of every eighth weight, folded as a tree, then what is left
    of a last block one by one), then block by block, then within the block one by one. A weight of 0 is never picked.
    """
    sums = np.empty(-(-len(weights) // CDF_BLOCK))
    return int(_kernels().pick(_contiguous(weights), len(weights), uniform, sums.ctypes.data))


def _contiguous(scores: Scores) -> int:
    assert scores.ndim == 1
    assert scores.strides[0] == scores.itemsize
    return int(scores.ctypes.data)


class _Kernels:
    """The compiled functions; `weights` and `draw` by the bytes of a score."""

    def __init__(self) -> None:
        self._library = Library(isa.detect())
        address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        find = self._library.address
        self.argmax = ctypes.CFUNCTYPE(None, address, size, size, size, address)(find("argmax", "argmax", argmax.build))
        weights_type = ctypes.CFUNCTYPE(None, address, size, number, number, address)
        draw_type = ctypes.CFUNCTYPE(size, address, size, number, number, number, address)
        pick_type = ctypes.CFUNCTYPE(size, address, size, number, address)
        self.weights = {n: weights_type(find("sampling", f"weights{8 * n}", build)) for n in (4, 8)}
        self.pick = pick_type(find("sampling", "pick", build))
        self.draw = {n: draw_type(find("sampling", f"draw{8 * n}", build)) for n in (4, 8)}


@functools.cache
def _kernels() -> _Kernels:
    return _Kernels()


def build(module: ir.Module) -> None:
    """Fill `module` with `weights32`, `weights64`, `draw32`, `draw64` and `pick`; see the functions of those names."""
    for score, bits in ((F32, 32), (F64, 64)):
        _build_weights(module, score, bits)
        numbers = [("maximum", F64), ("temperature", F64), ("uniform", F64)]
        params = [("scores", PTR), ("count", I64), *numbers, ("sums", PTR)]
        f = Function(module, f"{module.name}.draw{bits}", params, exported=True, result=I64)
        f.finish(_picked(f, _WeightsOfScores(f, score)))
    params = [("weights", PTR), ("count", I64), ("uniform", F64), ("sums", PTR)]
    f = Function(module, f"{module.name}.pick", params, exported=True, result=I64)
    f.finish(_picked(f, _StoredWeights(f)))


class _Weights(Protocol):
    """Where weights come from, by index."""

    def eight(self, first: Value) -> Value:
        """Those of first .. first + 7, which must exist."""

    def one(self, index: Value) -> Value:
        """The one of `index`, by the same arithmetic."""


class _StoredWeights:
    """Weights in memory."""

    def __init__(self, f: Function) -> None:
        self._weights = f["weights"]

    def eight(self, first: Value) -> Value:
        return (self._weights + first * 8).load(_F64x8)

    def one(self, index: Value) -> Value:
        return (self._weights + index * 8).load(F64)


class _WeightsOfScores:
    """Weights computed from scores of one element type."""

    def __init__(self, f: Function, score: ir.Type) -> None:
        self._f = f
        self._score = score
        self._size = 4 if score == F32 else 8

    def eight(self, first: Value) -> Value:
        values = (self._f["scores"] + first * self._size).load(vector(self._score, _LANES)).to(F64)
        return _exp(self._f, (values - self._f["maximum"]) / self._f["temperature"])

    def one(self, index: Value) -> Value:
        value = (self._f["scores"] + index * self._size).load(self._score).to(F64)
        return _exp(self._f, ((value - self._f["maximum"]) / self._f["temperature"]).splat(_LANES)).lane(0)


def _exp(f: Function, x: Value) -> Value:
    """e^x for x <= 0, within 2 ulp; 0 below -708."""
    k = (x * (1 / math.log(2)) + _ROUND) - _ROUND
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    p = f.constant(_F64x8, 1 / math.factorial(_DEGREE))
    for n in range(_DEGREE - 1, -1, -1):
        p = p * r + 1 / math.factorial(n)
    power = (((k + _ROUND).bitcast(_I64x8) + 1023) << 52).bitcast(_F64x8)  # the low bits of k + _ROUND are k's
    return (x < _LOWEST).select(f.constant(_F64x8, 0.0), p * power)


def _build_weights(module: ir.Module, score: ir.Type, bits: int) -> None:
    params = [("scores", PTR), ("count", I64), ("maximum", F64), ("temperature", F64), ("out", PTR)]
    f = Function(module, f"{module.name}.weights{bits}", params, exported=True)
    weights, whole = _WeightsOfScores(f, score), f["count"] // _LANES * _LANES
    with f.range(0, whole, step=_LANES) as first:
        (f["out"] + first * 8).store(weights.eight(first))
    with f.range(whole, f["count"]) as index:
        (f["out"] + index * 8).store(weights.one(index))
    f.finish()


def _picked(f: Function, weights: _Weights) -> Value:
    """The index `pick` returns, emitted into a function with `count`, `uniform` and `sums` (room for block sums)."""
    count, zero = f["count"], f.constant(F64, 0.0)
    total = f.variable(zero)
    with f.range(0, count, step=CDF_BLOCK) as first:
        block_sum = _block_sum(f, weights, first)
        (f["sums"] + first // CDF_BLOCK * 8).store(block_sum)
        total.value = total.value + block_sum
    below_total = (total.value.bitcast(I64) - 1).bitcast(F64)  # the next smaller float: rounding must not reach the end
    target = (f["uniform"] * total.value).minimum(below_total)

    # The block in which the running sum comes to exceed the target.
    before, chosen = f.variable(zero), f.variable(f.constant(I64, 0))
    with f.forever() as loop:
        after = before.value + (f["sums"] + chosen.value // CDF_BLOCK * 8).load(F64)
        loop.leave_if((after > target) | (chosen.value + CDF_BLOCK >= count))
        before.value = after
        chosen.value = chosen.value + CDF_BLOCK

    # Within it; where rounding has put the target beyond its end, the last that weighs anything.
    within, end = target - before.value, (chosen.value + CDF_BLOCK).minimum(count)
    running, index, found = f.variable(zero), f.variable(chosen.value), f.variable(chosen.value)
    with f.forever() as loop:
        weight = weights.one(index.value)
        with f.when(weight > 0.0):
            found.value = index.value
        running.value = running.value + weight
        index.value = index.value + 1
        loop.leave_if((running.value > within) | (index.value >= end))
    return found.value


def _block_sum(f: Function, weights: _Weights, first: Value) -> Value:
    last = (first + CDF_BLOCK).minimum(f["count"])
    whole = first + (last - first) // _LANES * _LANES
    sums = f.variable(f.constant(_F64x8, 0.0))
    with f.range(first, whole, step=_LANES) as index:
        sums.value = sums.value + weights.eight(index)
    folded, width = sums.value, _LANES
    while width > 1:
        width //= 2
        folded = folded.shuffle(range(width)) + folded.shuffle(range(width, 2 * width))
    total = f.variable(folded.lane(0))
    with f.range(whole, last) as index:
        total.value = total.value + weights.one(index)
    return total.value
