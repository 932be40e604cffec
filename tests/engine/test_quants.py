import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.quants import BLOCK_FORMATS, Quantized, dequantize, unpack
from tests.random_blocks import QUANTIZED, SCALES, block_sizes, oracle, random_blocks, type_id

FLOATS = ("F32", "F16", "BF16")
ALL_FINITE_FLOAT16 = np.arange(2**16, dtype=np.uint16).view(np.float16)[
    np.isfinite(np.arange(2**16, dtype=np.uint16).view(np.float16))
]


def test_thirteen_types_are_read_with_the_sizes_of_the_gguf_package():
    read = {
        block_format.name: (block_format.block_size, block_format.type_size) for block_format in BLOCK_FORMATS.values()
    }

    assert read == {name: block_sizes(name) for name in (*FLOATS, *QUANTIZED)}
    assert {number: block_format.name for number, block_format in BLOCK_FORMATS.items()} == {
        type_id(name): name for name in (*FLOATS, *QUANTIZED)
    }


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks_per_row=st.integers(1, 4))
def test_random_blocks_with_any_finite_scale_agree_with_the_gguf_package_in_every_bit(name, seed, rows, blocks_per_row):
    raw = random_blocks(name, rows * blocks_per_row, np.random.default_rng(seed), ALL_FINITE_FLOAT16)
    shape = (rows, blocks_per_row * block_sizes(name)[0])

    weights = dequantize(unpack(type_id(name), raw.ravel(), shape))

    assert weights.dtype == np.float32
    assert weights.shape == shape
    assert np.array_equal(weights, oracle(name, raw, shape))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x55, 0xAA])
def test_extreme_codes_agree_with_the_gguf_package(name, fill):
    scales = np.array([65504, -65504, 6e-8, -6e-8], np.float16)
    raw = np.full((4, block_sizes(name)[1]), fill, np.uint8)
    for offset in SCALES[name]:
        raw[:, offset : offset + 2] = scales[:, None].view(np.uint8)

    weights = dequantize(unpack(type_id(name), raw.ravel(), (4, block_sizes(name)[0])))

    assert np.array_equal(weights, oracle(name, raw, weights.shape))


@pytest.mark.parametrize("name", FLOATS)
def test_plain_numbers_of_every_bit_pattern_agree_with_numpy(name):
    halves = np.arange(2**16, dtype=np.uint16)
    if name == "F32":
        raw = np.random.default_rng(0).integers(0, 256, 4 * 4096, np.uint8)
        expected = raw.view(np.float32)
    else:
        raw = halves.view(np.uint8)
        expected = halves.view(np.float16) if name == "F16" else (halves.astype(np.uint32) << 16).view(np.float32)

    values = unpack(type_id(name), raw, (64, expected.size // 64))

    assert values.dtype == np.float32
    assert np.array_equal(values.ravel(), expected, equal_nan=True)
    assert dequantize(values) is values


def test_a_q4_0_block_worked_by_hand():
    # d = 0.5; byte 0 holds weight 0 = 15 -> (15 - 8) / 2 and weight 16 = 0 -> -4; every other code is 8 -> 0.
    raw = np.frombuffer(np.float16(0.5).tobytes() + bytes([0x0F] + [0x88] * 15), np.uint8)

    tensor = unpack(type_id("Q4_0"), raw, (1, 32))

    assert isinstance(tensor, Quantized)
    assert tensor.codes[0, [0, 1, 16, 17]].tolist() == [15, 8, 0, 8]
    assert tensor.scale.tolist() == [[0.5]]
    assert tensor.min.tolist() == [[-4.0]]
    assert dequantize(tensor)[0, [0, 1, 16, 17]].tolist() == [3.5, 0.0, -4.0, 0.0]


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_fit_their_bits_and_need_them(name):
    shape = (64, 2 * block_sizes(name)[0])
    raw = random_blocks(name, 128, np.random.default_rng(2))

    tensor = unpack(type_id(name), raw.ravel(), shape)

    assert isinstance(tensor, Quantized)
    assert (tensor.codes.dtype, tensor.scale.dtype, tensor.min.dtype) == (np.uint8, np.float32, np.float32)
    assert tensor.shape == tensor.codes.shape == shape
    assert tensor.scale.shape == tensor.min.shape == (64, shape[1] // tensor.group)
    assert tensor.group in (16, 32)
    assert tensor.bits == (4 if tensor.codes.max() < 16 else 8)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_scale_times_a_code_is_never_rounded(name):
    """So a kernel may multiply in any order, or fuse, and still get the format's own weights."""
    raw = random_blocks(name, 64, np.random.default_rng(3), ALL_FINITE_FLOAT16)
    tensor = unpack(type_id(name), raw.ravel(), (64, block_sizes(name)[0]))
    assert isinstance(tensor, Quantized)
    codes = tensor.codes.reshape(*tensor.scale.shape, tensor.group)

    products = tensor.scale[..., None] * codes.astype(np.float32)

    assert np.array_equal(products, tensor.scale[..., None].astype(np.float64) * codes)


def test_the_real_quantizer_s_blocks_come_back_near_the_weights():
    weights = np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)

    assert np.abs(dequantize(unpack(type_id("Q8_0"), raw.ravel(), (8, 64))) - weights).max() < 0.02


def test_tensors_of_one_and_of_three_dimensions_keep_their_shape():
    raw = random_blocks("Q8_0", 12, np.random.default_rng(5)).ravel()

    flat = dequantize(unpack(type_id("Q8_0"), raw, (384,)))
    deep = dequantize(unpack(type_id("Q8_0"), raw, (2, 3, 64)))

    assert flat.shape == (384,)
    assert np.array_equal(deep, flat.reshape(2, 3, 64))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FLOATS, *QUANTIZED])
def test_a_tensor_of_many_parts_is_unpacked_whole_and_in_little_more_memory_than_it_takes(name):
    block_size, type_size = block_sizes(name)
    n_blocks = (5 << 20) // type_size
    raw = random_blocks(name, n_blocks, np.random.default_rng(6)) if name in QUANTIZED else None
    raw = np.resize(np.arange(120, dtype=np.uint8), (n_blocks, type_size)) if raw is None else raw
    shape = (1, n_blocks * block_size)

    tracemalloc.start()
    tensor = unpack(type_id(name), raw.ravel(), shape)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    parts = (tensor.codes, tensor.scale, tensor.min) if isinstance(tensor, Quantized) else (tensor,)
    assert peak < sum(part.nbytes for part in parts) + (24 << 20)
    assert np.array_equal(dequantize(tensor), oracle(name, raw, shape))


@pytest.mark.parametrize("name", [*FLOATS, *QUANTIZED])
def test_what_is_unpacked_is_a_copy(name):
    block_size, type_size = block_sizes(name)
    raw = np.full(type_size, 0x11, np.uint8)
    tensor = unpack(type_id(name), raw, (block_size,))
    before = dequantize(tensor).copy()

    raw[:] = 0

    assert np.array_equal(dequantize(tensor), before)


@pytest.mark.parametrize("shape", [(2, 32), (1, 33), (0, 32), (), (16, 2)])
def test_a_shape_that_does_not_fit_the_bytes_is_refused(shape):
    with pytest.raises(ValueError, match="18 bytes of Q4_0"):
        unpack(type_id("Q4_0"), np.zeros(18, np.uint8), shape)


@pytest.mark.parametrize("number", [4, 5, 9, 15, 39, -1, 2**32 - 1])
def test_an_unknown_type_is_refused(number):
    with pytest.raises(ValueError, match=f"tensor type {number}"):
        unpack(number, np.zeros(32, np.uint8), (32,))
