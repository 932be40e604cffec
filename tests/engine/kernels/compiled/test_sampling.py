"""The compiled steps of sampling against the same arithmetic in numpy, bit for bit."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.compiled.sampling import CDF_BLOCK, draw, largest, pick, weights

LANES = 8
SIZES = st.one_of(st.integers(1, 20), st.integers(250, 260), st.integers(500, 1100))


def exp(x):
    """For x <= 0: 2^k times the Taylor polynomial of the rest, the ln 2 of k in two parts."""
    k = np.rint(x * (1 / math.log(2)))
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    p = np.full_like(x, 1 / math.factorial(13))
    for n in range(12, -1, -1):
        p = p * r + 1 / math.factorial(n)
    return np.where(x < -708, 0.0, np.ldexp(p, k.astype(np.int64)))


def sum_of_block(block):
    whole = len(block) // LANES * LANES
    sums = np.zeros(LANES)
    for row in block[:whole].reshape(-1, LANES):
        sums = sums + row
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    total = float(sums[0])
    for weight in block[whole:]:
        total += float(weight)
    return total


def picked(all_weights, uniform):
    blocks = [all_weights[start : start + CDF_BLOCK] for start in range(0, len(all_weights), CDF_BLOCK)]
    ends = np.cumsum([sum_of_block(block) for block in blocks])
    target = min(uniform * ends[-1], np.nextafter(ends[-1], 0))
    chosen = int(np.flatnonzero(ends > target)[0])
    within = target - (ends[chosen - 1] if chosen else 0.0)
    running = np.cumsum(blocks[chosen])
    beyond = np.flatnonzero(running > within)
    index = beyond[0] if len(beyond) else np.flatnonzero(blocks[chosen])[-1]
    return chosen * CDF_BLOCK + int(index)


def scores(size, seed, dtype, spread=8.0):
    rng = np.random.default_rng(seed)
    values = rng.normal(0, spread, size).astype(dtype)
    values[rng.random(size) < 0.2] = values[0]  # equals
    return values


@settings(max_examples=60, deadline=None)
@given(
    size=SIZES,
    seed=st.integers(0, 999),
    dtype=st.sampled_from([np.float32, np.float64]),
    temperature=st.sampled_from([1e-300, 1e-3, 0.7, 1.0, 1.3, 50.0, 1e300]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_weights_and_draws_are_those_of_the_definition(size, seed, dtype, temperature, uniform):  # fmt: skip
    values = scores(size, seed, dtype)
    maximum = float(values.max())
    with np.errstate(over="ignore", invalid="ignore"):
        expected = exp((values - np.float64(maximum)) / temperature)
    actual = weights(values, maximum, temperature)
    np.testing.assert_array_equal(actual, expected)
    chosen = draw(values, maximum, temperature, uniform)
    assert chosen == picked(expected, uniform) == pick(actual, uniform)
    assert actual[chosen] > 0


@pytest.mark.parametrize("size", [1, 7, 8, 9, 255, 256, 257, 1000])
def test_neither_end_of_the_uniform_numbers_picks_what_weighs_nothing(size):
    values = scores(size, 1, np.float64)
    values[0] = values[-1] = -np.inf
    if size > 2:
        values[size // 2 :] = -np.inf
        values[size // 2 - 1] = 3.0
    else:
        values[0] = 0.0
    for uniform in (0.0, 5e-324, 0.5, 1 - 2**-53):
        assert values[draw(values, float(values.max()), 1.0, uniform)] > -np.inf


def test_exp_is_accurate():
    x = -np.linspace(0, 708, 20001)
    actual = weights(x, 0.0, 1.0)
    assert (np.abs(actual - np.exp(x)) <= 2 * np.spacing(np.exp(x))).all()
    assert weights(np.array([0.0, -0.0, -708.5, -np.inf]), 0.0, 1.0).tolist() == [1, 1, 0, 0]


def test_draws_follow_the_weights():
    values = np.log(np.array([1, 2, 3, 4], np.float64))
    counts = np.bincount([draw(values, values.max(), 1.0, (i + 0.5) / 1000) for i in range(1000)], minlength=4)
    assert counts.tolist() == [100, 200, 300, 400]


@given(size=st.integers(1, 70), seed=st.integers(0, 99))
def test_largest_is_the_first_of_equals(size, seed):
    values = np.random.default_rng(seed).integers(0, 3, size).astype(np.float32)
    broken = values.copy()
    broken[seed % size] = [np.nan, np.inf, -np.inf][seed % 3]
    rows = np.full((3, size + 5), 9, np.float32)  # rows of logits are parts of wider ones
    rows[:, :size] = values, broken, values
    assert largest(rows[:, :size]).tolist() == [values.argmax(), -1, values.argmax()]
