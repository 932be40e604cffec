import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from engine.kernels.reference.linear import ROWS, FloatLinear, Int8Linear, quantize
from engine.quants import dequantize, unpack
from tests.random_blocks import block_sizes, random_blocks, type_id

pytestmark = pytest.mark.slow

SMOLLM2 = [(576, 576), (192, 576), (1536, 576), (576, 1536)]
ODD = [(2, 1), (3, 7), (47, 33), (49, 255), (95, 257), (97, 513), (161, 100), (500, 300), (1001, 577)]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def at_offset(values, offset):
    """A copy of `values` that begins `offset` bytes after a cache line."""
    memory = np.empty(values.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + values.nbytes].view(np.float32).reshape(values.shape)
    copy[:] = values
    return copy


def quantized(name, n_out, n_in, seed=0):
    block_size, _ = block_sizes(name)
    blocks = random_blocks(name, n_out * n_in // block_size, np.random.default_rng(seed))
    return unpack(type_id(name), np.frombuffer(blocks.tobytes(), np.uint8), (n_out, n_in))


@pytest.mark.parametrize("shape", [*SMOLLM2, *ODD], ids=str)
def test_product_is_the_matrix_product(shape):
    weights, x = numbers(*shape), numbers(2 * ROWS, shape[1], seed=1)
    exact = x.astype(np.float64) @ weights.T.astype(np.float64)
    # 1e-6 of the sum of magnitudes: float32 has 6e-8 a step, and errors of random signs grow with the square root.
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(weights).T.astype(np.float64))
    assert (np.abs(FloatLinear(weights)(x) - exact) <= bound).all()


@pytest.mark.parametrize("shape", [*SMOLLM2, *ODD], ids=str)
def test_a_row_does_not_depend_on_its_place_its_neighbours_or_where_it_lies(shape):
    linear, row = FloatLinear(numbers(*shape)), numbers(shape[1], seed=1)
    alone = np.zeros((ROWS, shape[1]), np.float32)
    alone[0] = row
    expected = linear(alone)[0]
    for place in range(ROWS + 1):
        x = at_offset(numbers(2 * ROWS, shape[1], seed=place), 4 * (place % 16))
        x[place] = row
        np.testing.assert_array_equal(linear(x)[place], expected)


def test_a_row_of_infinities_spoils_no_other():
    linear, x = FloatLinear(numbers(50, 70)), numbers(ROWS, 70, seed=1)
    expected = linear(x)
    x[3] = np.inf
    with np.errstate(invalid="ignore"):
        out = linear(x)
    np.testing.assert_array_equal(np.delete(out, 3, axis=0), np.delete(expected, 3, axis=0))


_DIGEST_OF_PRODUCTS = """
import hashlib, sys
import numpy as np
from engine.kernels.reference.linear import ROWS, FloatLinear
digest = hashlib.sha256()
for n_out, n_in in eval(sys.argv[1]):
    rng = np.random.default_rng(n_out + n_in)
    linear = FloatLinear(rng.standard_normal((n_out, n_in)).astype(np.float32))
    row = rng.standard_normal(n_in).astype(np.float32)
    for place in (0, 5, 15):
        x = rng.standard_normal((ROWS, n_in)).astype(np.float32)
        x[place] = row
        digest.update(linear(x)[place].tobytes())
        assert place == 0 or np.array_equal(linear(x)[place], expected), (n_out, n_in, place)
        expected = linear(x)[place]
print(digest.hexdigest())
"""


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="names OpenBLAS kernels of x86-64")
@pytest.mark.parametrize("core", ["Sandybridge", "Haswell", "SkylakeX"])
def test_products_do_not_depend_on_the_number_of_blas_threads(core):
    features = np.show_config(mode="dicts")["SIMD Extensions"].get("found", ())
    if core == "SkylakeX" and "X86_V4" not in features and "AVX512_SKX" not in features:
        pytest.skip("this CPU has no AVX-512")
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST_OF_PRODUCTS, repr([*SMOLLM2, *ODD])],
            env={**os.environ, "OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(digests) == 1


def test_activations_are_rounded_half_to_even_and_scaled_by_their_largest():
    x = np.zeros((2, 64), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -126.5]
    x[1, 32:34] = [-2, 1]
    codes, scale = quantize(x)
    assert codes[0, :6].tolist() == [127, 0, 2, 2, 0, -126]
    assert codes[1, 32:34].tolist() == [-127, 64]
    assert scale.tolist() == [[1, 0], [0, np.float32(2) / np.float32(127)]]
    assert not codes[0, 32:].any()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K"])
def test_int8_product_is_the_sum_over_groups_in_order(name):
    weights = quantized(name, 5, 256)
    x = numbers(ROWS, 256, seed=1)
    codes, scale = quantize(x)
    out = Int8Linear(weights)(x)
    for row in (0, 7):
        for n in range(5):
            total = np.float32(0)
            for g, start in enumerate(range(0, 256, weights.group)):
                a = codes[row, start : start + weights.group].astype(np.int64)
                w = weights.codes[n, start : start + weights.group].astype(np.int64)
                group = np.float32(a @ w) * weights.scale[n, g] + np.float32(a.sum()) * weights.min[n, g]
                total += group * scale[row, start // 32]
            assert out[row, n] == total


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q3_K", "Q5_K"])
def test_int8_product_is_exact_for_activations_that_int8_holds(name):
    weights = quantized(name, 7, 512)
    rng = np.random.default_rng(2)
    x = rng.integers(-127, 128, (ROWS, 512)).astype(np.float32)
    x[:, ::32] = 127
    expected = x.astype(np.float64) @ dequantize(weights).T.astype(np.float64)
    bound = 1e-6 * np.abs(x).astype(np.float64) @ np.abs(dequantize(weights)).T.astype(np.float64)
    assert (np.abs(Int8Linear(weights)(x) - expected) <= 16 * bound).all()


def test_an_int8_row_does_not_depend_on_its_place_or_neighbours():
    linear, row = Int8Linear(quantized("Q4_K", 100, 512)), numbers(512, seed=1)
    outs = []
    for place in range(ROWS):
        x = numbers(ROWS, 512, seed=place)
        x[place] = row
        outs.append(linear(x)[place])
    assert all(np.array_equal(out, outs[0]) for out in outs)
