"""Tensors in tiles: nothing is lost that the file holds."""

import numpy as np
import pytest

from engine.kernels.compiled.formats import BLOCK, TILE, TileFormat, pack, rounded
from engine.quants import Quantized, dequantize, unpack
from tests.engine.kernels.compiled.native import PATHS, row_weights
from tests.random_blocks import QUANTIZED, block_sizes, random_blocks, type_id

pytestmark = pytest.mark.slow

SOME_QUANTS = ("Q4_1", "Q6_K", "Q8_0")
PATHS_AND_QUANTS = [(path, quant) for path in PATHS for quant in (QUANTIZED if path == PATHS[0] else SOME_QUANTS)]
"""All types on the path that serves here, some on the others: each takes a second to compile."""


def random_tensor(quant, n, k, seed=0):
    if quant == "F32":
        return np.random.default_rng(seed).normal(0, 0.02, (n, k)).astype(np.float32)
    block_size, _ = block_sizes(quant)
    raw = random_blocks(quant, n * k // block_size, np.random.default_rng(seed)).reshape(-1)
    return unpack(type_id(quant), raw, (n, k))


@pytest.mark.parametrize(("path", "quant"), PATHS_AND_QUANTS)
def test_a_packed_row_is_the_tensors_row_bit_for_bit(path, quant):
    tensor = random_tensor(quant, 37, 512)
    matrix = pack(tensor)
    expected = dequantize(tensor)
    for n in range(37):
        np.testing.assert_array_equal(row_weights(path, matrix, n), expected[n])
    assert not row_weights(path, matrix, 37).any()
    assert matrix.n_tiles * TILE == 48


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ("Q4_0", TileFormat(4, 32, 8, 2)),
        ("Q4_1", TileFormat(4, 32, None, 2)),
        ("Q5_0", TileFormat(8, 32, 16, 2)),
        ("Q8_0", TileFormat(8, 32, 128, 2)),
        ("Q2_K", TileFormat(4, 16, None, 4)),
        ("Q3_K", TileFormat(4, 16, 4, 4)),
        ("Q4_K", TileFormat(4, 32, None, 4)),
        ("Q6_K", TileFormat(8, 16, 32, 4)),
    ],
)
def test_symmetric_formats_need_no_mins_and_float16_scales_stay_float16(quant, expected):
    assert pack(random_tensor(quant, 16, 512)).format == expected


def test_a_scale_that_float16_would_round_keeps_its_matrix_in_float32():
    tensor = random_tensor("Q8_0", 16, 64)
    odd = tensor.scale.copy()
    odd[3, 1] = 1 + 2.0**-12
    odd_tensor = Quantized(tensor.packed, odd, -128 * odd, 32, 8)
    matrix = pack(odd_tensor)
    assert matrix.format.scale_bytes == 4
    np.testing.assert_array_equal(row_weights(PATHS[0], matrix, 3), dequantize(odd_tensor)[3])


@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 31), (17, 33), (48, 100)])
def test_float_weights_of_any_size_become_8_bits_and_zeros_fill_up(n, k):
    weights = np.random.default_rng(n).normal(0, 1, (n, k)).astype(np.float32)
    matrix = pack(rounded(weights), rows_multiple=BLOCK)
    packed = np.array([row_weights(PATHS[0], matrix, row) for row in range(matrix.n_tiles * TILE)])
    assert packed.shape == (-(-n // 32) * 32, -(-k // 32) * 32)
    largest = np.abs(weights).max()
    assert np.abs(packed[:n, :k] - weights).max() <= largest / 127  # half a step, and the float16 of the scale
    assert not packed[n:].any()
    assert not packed[:, k:].any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 33), (48, 100)])
def test_float_weights_are_kept_bit_for_bit_and_zeros_fill_up(path, n, k):
    weights = np.random.default_rng(n).normal(0, 1, (n, k)).astype(np.float32)
    matrix = pack(weights, rows_multiple=BLOCK)
    packed = np.array([row_weights(path, matrix, row) for row in range(matrix.n_tiles * TILE)])
    np.testing.assert_array_equal(packed[:n, :k], weights)
    assert not packed[n:].any()
    assert not packed[:, k:].any()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_float_weights_of_any_magnitude_keep_their_precision(size):
    weights = (np.random.default_rng(0).normal(0, 1, (16, 32)) * size).astype(np.float32)
    packed = np.array([row_weights(PATHS[0], pack(rounded(weights)), row) for row in range(16)])
    assert np.abs(packed - weights).max() <= np.abs(weights).max() / 127


def test_large_matrices_are_packed_in_parts_like_small_ones():
    tensor = random_tensor("Q4_1", 16 * 300, 1024)
    matrix = pack(tensor)
    for n in (0, 1, 2047, 2048, 4095, 4096, 4799):
        np.testing.assert_array_equal(row_weights(PATHS[0], matrix, n), dequantize(tensor)[n])
