"""Greedy choice over a vocabulary, for a whole batch in one call."""

from llvmlite import ir

from engine.kernels.compiled.lang import F32, I32, I64, LANES, PTR, F32x16, Function, I32x16, Value
from engine.kernels.compiled.vectors import fold, lane_numbers, magnitude

_INFINITY = 0x7F800000
_NO_INDEX = 0x7FFFFFFF


def build(module: ir.Module) -> None:
    """Fill `module` with `argmax(logits, rows, stride, width, out)`.

    out[r], int64, is the index of the largest of `width` float32 at `logits + r * stride`, the lowest among equals,
    or -1 if one of them is not finite.
    """
    params = [("logits", PTR), ("rows", I64), ("stride", I64), ("width", I64), ("out", PTR)]
    f = Function(module, f"{module.name}.argmax", params, exported=True)
    with f.range(0, f["rows"]) as row:
        (f["out"] + row * 8).store(_argmax(f, f["logits"] + row * f["stride"]))
    f.finish()


def _argmax(f: Function, logits: Value) -> Value:
    whole = f["width"] // LANES * LANES
    best, best_at = f.variable(f.constant(F32x16, -3.4e38)), f.variable(f.constant(I32x16, _NO_INDEX))
    largest_bits = f.variable(f.constant(I32x16, 0))
    with f.range(0, whole, step=LANES) as i:
        values = (logits + i * 4).load(F32x16)
        # As integers, the magnitudes of floats have the floats' order, infinities and NaNs being the largest.
        largest_bits.value = largest_bits.value.maximum(magnitude(values).bitcast(I32x16))
        is_better = values > best.value
        best.value = is_better.select(values, best.value)
        best_at.value = is_better.select(lane_numbers(f) + i.to(I32), best_at.value)

    largest = f.variable(fold(best.value, Value.maximum))
    is_largest = best.value.equals(largest.value)
    at = f.variable(fold(is_largest.select(best_at.value, f.constant(I32x16, _NO_INDEX)), Value.minimum))
    bits = f.variable(fold(largest_bits.value, Value.maximum))
    with f.range(whole, f["width"]) as i:
        value = (logits + i * 4).load(F32)
        bits.value = bits.value.maximum(value.bitcast(I32) & 0x7FFFFFFF)
        with f.when((value > largest.value) | at.value.equals(_NO_INDEX)):
            largest.value = value
            at.value = i.to(I32)
    is_finite = bits.value < _INFINITY
    return is_finite.select(at.value, f.constant(I32, -1)).to(I64)
