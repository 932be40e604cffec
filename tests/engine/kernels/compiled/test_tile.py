"""The matrix product's inner kernel on every CPU path that runs here; the others are compiled and looked at."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.compiled import isa, tile
from engine.kernels.compiled.formats import TileFormat, pack
from engine.kernels.compiled.jit import Library
from engine.kernels.compiled.quantize import PANEL_ROWS
from engine.kernels.reference.linear import Int8Linear, quantize
from engine.quants import Quantized, paired
from tests.engine.kernels.compiled.native import PATHS, panel_of, product
from tests.engine.kernels.compiled.test_formats import PATHS_AND_QUANTS, SOME_QUANTS, random_tensor

pytestmark = pytest.mark.slow

ROW_COUNTS = range(1, PANEL_ROWS + 1)
"""Each has code of its own."""
IN_FOURS = 4 * sum(4 * (rows % 4 == 1) + rows - (rows % 4 == 1) for rows in ROW_COUNTS)
"""Instructions where one row is unrolled, which the fifth is too, and two to four are a loop that goes round four
times."""
EXTREMES = st.sampled_from(["random", "all largest", "all smallest", "alternating"])


def codes_of(kind, n, k, bits, rng):
    largest = (1 << bits) - 1
    if kind == "random":
        return rng.integers(0, largest + 1, (n, k), np.uint8)
    if kind == "alternating":
        return np.broadcast_to(np.arange(k) % 2 * largest, (n, k)).astype(np.uint8)
    return np.full((n, k), largest if kind == "all largest" else 0, np.uint8)


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.tuples(EXTREMES, EXTREMES),
    form=st.sampled_from([(4, 32, None), (4, 16, 4), (8, 32, 128), (8, 16, None)]),
    blocks=st.integers(1, 5),
    n_rows=st.integers(1, PANEL_ROWS),
    seed=st.integers(0, 999),
)
def test_every_path_computes_the_exact_integers(kinds, form, blocks, n_rows, seed):
    """With scales of 1 the float sums are whole numbers below 2^24, so the output is the integer dot product."""
    rng, k = np.random.default_rng(seed), 32 * blocks
    bits, group, offset = form
    kind, x_kind = kinds
    codes = codes_of(kind, 16, k, bits, rng)
    scale = np.ones((16, k // group), np.float32)
    minimum = -offset * scale if offset is not None else rng.integers(-3, 4, scale.shape).astype(np.float32)
    x = {"all largest": 127, "all smallest": -127, "alternating": np.where(np.arange(k) % 2, -127, 127)}.get(
        x_kind, rng.integers(-127, 128, (n_rows, k))
    ) * np.ones((n_rows, 1), np.int64)
    x = np.broadcast_to(x, (n_rows, k)).copy()
    x[:, ::32] = 127  # so that each block's scale is 1
    weights = codes.astype(np.int64) + np.repeat(minimum, group, axis=1).astype(np.int64)
    matrix = pack(Quantized(codes if bits == 8 else paired(codes), scale, minimum, group, bits))
    assert matrix.format.offset == offset or offset is None
    for path in PATHS:
        out = product(path, matrix, panel_of(path, x), n_rows)
        np.testing.assert_array_equal(out.astype(np.int64), x @ weights.T, err_msg=path)


@pytest.mark.parametrize(("path", "quant"), PATHS_AND_QUANTS)
def test_a_product_is_the_references_int8_product(path, quant):
    """Both sum exact integers scaled in float32 in block order; the kernel's fused operations round less often."""
    rng = np.random.default_rng(1)
    tensor = random_tensor(quant, 32, 512)
    x = rng.normal(0, 1, (PANEL_ROWS, 512)).astype(np.float32)
    expected = Int8Linear(tensor)(x)
    actual = product(path, pack(tensor), panel_of(path, x), PANEL_ROWS)
    # 32 blocks, each rounded a few times at the size of its terms.
    tolerance = 64 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("path", PATHS)
def test_float_weights_are_multiplied_in_order_within_each_block(path):
    """The same arithmetic in numpy, bit for bit; float64 holds each product exactly, as a fused operation does."""
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 1, (16, 96)).astype(np.float32)
    x = rng.normal(0, 1, (PANEL_ROWS, 96)).astype(np.float32)
    codes, scale = quantize(x)
    fused = np.float64 if path != "plain" else np.float32
    expected = np.zeros((PANEL_ROWS, 16), np.float32)
    for block in range(3):
        sums = np.zeros((PANEL_ROWS, 16), np.float32)
        for k in range(32 * block, 32 * block + 32):
            product_of_k = fused(weights[:, k]) * fused(codes[:, k, None])
            sums = (product_of_k + sums).astype(np.float32)
        scaled = fused(sums) * fused(scale[:, block, None])
        expected = (scaled + expected).astype(np.float32)
    np.testing.assert_array_equal(product(path, pack(weights), panel_of(path, x), PANEL_ROWS), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("quant", [*SOME_QUANTS, "F32"])
def test_a_row_is_the_same_whatever_rows_stand_beside_it(quant, path):
    matrix = pack(random_tensor(quant, 16, 256))
    x = np.random.default_rng(2).normal(0, 1, (PANEL_ROWS, 256)).astype(np.float32)
    whole = product(path, matrix, panel_of(path, x), PANEL_ROWS)
    for n_rows in range(1, PANEL_ROWS):
        np.testing.assert_array_equal(product(path, matrix, panel_of(path, x), n_rows), whole[:n_rows])
    for row in range(PANEL_ROWS):
        np.testing.assert_array_equal(product(path, matrix, panel_of(path, x[row:]), 1)[0], whole[row])


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), exponent=st.integers(-30, 30))
def test_activations_are_quantized_as_the_reference_does(path, seed, exponent):
    x = np.random.default_rng(seed).normal(0, 2.0**exponent, (2, 96)).astype(np.float32)
    x[1, 32:64] = 0
    codes, scale = quantize(x)
    panel = panel_of(path, x).reshape(3, -1)
    stored_codes = panel[:, : tile.SCALES].view(np.int8).reshape(3, PANEL_ROWS, 32)
    stored_scales = panel[:, tile.SCALES : tile.SCALED_SUMS].copy().view(np.float32)
    sums = panel[:, tile.SUMS : tile.FIRST_SUMS].copy().view(np.int32)
    for row in range(2):
        np.testing.assert_array_equal(stored_codes[:, row].reshape(-1), codes[row])
        np.testing.assert_array_equal(stored_scales[:, row], scale[row])
        np.testing.assert_array_equal(sums[:, row], codes[row].reshape(3, 32).sum(axis=1))


@pytest.mark.parametrize(
    ("path", "instruction", "count"),
    [
        ("avx-vnni", "vpdpbusd", IN_FOURS),
        ("neon-dot", "sdot", 32 * sum(ROW_COUNTS)),
        ("avx2", "vpmaddubsw", IN_FOURS),
    ],
)
def test_a_path_is_compiled_to_its_instruction(path, instruction, count):
    fmt = TileFormat(4, 32, None, 2)
    try:
        cpu_path = isa.named(path)
        library = Library(cpu_path)
    except RuntimeError:
        pytest.skip(f"this LLVM cannot compile for {path}")
    text = library.assembly(fmt.name, lambda module: tile.build(module, cpu_path, fmt))
    assert text.count(instruction) == count


def test_the_oldest_cpus_of_paths_give_the_bits_of_this_one():
    """Only a CPU without fused multiply-add rounds differently."""
    matrix = pack(random_tensor("Q4_1", 64, 512))
    x = np.random.default_rng(3).normal(0, 1, (PANEL_ROWS, 512)).astype(np.float32)
    digests = {
        hashlib.sha256(product(path, matrix, panel_of(path, x), PANEL_ROWS).tobytes()).hexdigest()
        for path in PATHS
        if path != "plain"
    }
    assert len(digests) <= 1
