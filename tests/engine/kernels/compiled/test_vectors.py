import numpy as np
import pytest

from engine.kernels.compiled.lang import F32x16
from engine.kernels.compiled.vectors import exp
from tests.engine.kernels.compiled.native import PATHS, call, lanes


def applied(address, x):
    out = np.empty_like(x)
    for start in range(0, len(x), 16):
        call(address, x[start : start + 16], out[start:])
    return out


@pytest.mark.parametrize("path", PATHS)
def test_exp_is_within_two_units_in_the_last_place(path):
    x = np.concatenate([np.linspace(-87, 88, 16000), np.linspace(-1e-3, 1e-3, 1600)]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    error = np.abs(applied(lanes(path, "test_exp", exp), x) - expected) / np.spacing(expected.astype(np.float32))
    assert error.max() < 2


@pytest.mark.parametrize("path", PATHS)
def test_exp_of_zero_is_one_and_far_values_are_bounded(path):
    x = np.full(16, -1e30, np.float32)
    x[:4] = 0, -0.0, 1e30, np.inf
    out = applied(lanes(path, "test_exp", exp), x)
    assert out[0] == out[1] == 1
    assert np.isfinite(out).all()
    assert (out[4:] < 1.7e-38).all()


@pytest.mark.parametrize("path", PATHS)
def test_exp_is_the_same_in_every_lane(path):
    x = np.random.default_rng(0).uniform(-20, 20, 16).astype(np.float32)
    address = lanes(path, "test_exp", exp)
    first = applied(address, x)
    for shift in range(1, 16):
        np.testing.assert_array_equal(applied(address, np.roll(x, shift)), np.roll(first, shift))


@pytest.mark.parametrize("path", PATHS)
def test_float16_conversions_are_those_of_ieee_754(path):
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.isfinite(bits.view(np.float16))]
    numbers = bits.view(np.float16)

    def to_float16(f, cpu_path, x):
        low = cpu_path.to_float16(f, x)
        return low.concatenate(low).bitcast(F32x16)

    def through_memory(f, cpu_path, _x):
        return cpu_path.load_float16(f["x"])

    narrow, widen = lanes(path, "test_narrow", to_float16), lanes(path, "test_widen", through_memory)
    exact = np.resize(numbers, -(-len(numbers) // 16) * 16)
    out = np.empty(len(exact), np.float32)
    for start in range(0, len(exact), 16):
        call(widen, exact[start : start + 16], out[start:])
    np.testing.assert_array_equal(out.view(np.uint32), exact.astype(np.float32).view(np.uint32))

    # Every float16, what lies half-way to the next, and a little to either side.
    values = np.sort(exact.astype(np.float32))
    halfway = (values[:-1] + values[1:]) / 2
    tried = np.concatenate([values, halfway, np.nextafter(halfway, np.inf), np.nextafter(halfway, -np.inf)])
    tried = np.concatenate([tried, np.float32([65504, 65519.99, 65520, 1e9, -1e9])])
    tried = np.resize(tried.astype(np.float32), -(-len(tried) // 16) * 16)
    result = np.empty((len(tried) // 16, 32), np.uint16)
    for index in range(len(result)):
        call(narrow, tried[16 * index : 16 * index + 16], result[index])
    with np.errstate(over="ignore"):
        expected = tried.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(result[:, :16].reshape(-1), expected)
