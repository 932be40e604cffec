import numpy as np
import pytest

from engine.batch import Chunk
from engine.errors import CacheError
from engine.kernels.reference.rope import rotate, rotation
from engine.model import Model
from tests.llama_oracle import LlamaOracle
from tests.random_blocks import QUANTIZED
from tests.tiny_model import write_as_float32, write_tiny_llama

VOCAB = 263
SHAPES = {
    "grouped": {},
    "no groups": {"n_heads": 4, "n_kv_heads": 4},
    "groups of 8": {"n_heads": 8, "n_kv_heads": 1},
    "odd sizes": {"n_layers": 3, "d_model": 37, "n_heads": 3, "n_kv_heads": 1, "d_head": 10, "d_ff": 53},
    "own head": {"tied": False},
    "part of each head turned": {"metadata": {"llama.rope.dimension_count": 6}},
    "another base": {"metadata": {"llama.rope.freq_base": 100000.0}},
}


def ids(n, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, n).tolist())


def logits_of(model, token_ids, dtype="float32"):
    return model.forward([Chunk(0, 0, token_ids, len(token_ids))], model.new_cache(1, len(token_ids), dtype))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_are_those_of_a_plain_float64_llama(tmp_path, shape):
    path = write_tiny_llama(tmp_path / "m.gguf", **shape)
    token_ids = ids(40)
    logits = logits_of(Model.load(path, kernels="reference"), token_ids)
    assert logits.dtype == np.float32
    # Logits here are around 1; float32 has 24 bits, and a few thousand sums of random sign cost some of them.
    np.testing.assert_allclose(logits, LlamaOracle(path).logits(token_ids), atol=2e-5)


@pytest.mark.parametrize("turned", [{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, None])
def test_scaled_frequencies_and_divisors_reach_the_rotation(tmp_path, turned):
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    divisors = np.linspace(1, 8, 8).astype(np.float32)
    extra = {"metadata": turned} if turned else {"tensors": {"rope_freqs.weight": divisors}}
    path = write_tiny_llama(tmp_path / "m.gguf", **extra)
    frequencies = plain / 4 if turned else plain / divisors
    token_ids = ids(30)
    logits = logits_of(Model.load(path, kernels="reference"), token_ids)
    np.testing.assert_allclose(logits, LlamaOracle(path, frequencies).logits(token_ids), atol=2e-5)
    assert np.abs(logits - LlamaOracle(path).logits(token_ids)).max() > 1e-3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quant", [*QUANTIZED, "F16", "BF16"])
def test_every_quant_type_gives_the_logits_of_its_dequantized_weights(tmp_path, quant, tied):
    path = write_tiny_llama(tmp_path / "quantized.gguf", quant=quant, n_layers=1, tied=tied)
    same = write_as_float32(path, tmp_path / "float32.gguf")
    token_ids = ids(20)
    ours, theirs = (logits_of(Model.load(p, kernels="reference"), token_ids) for p in (path, same))
    assert np.isfinite(ours).all()
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("quant", QUANTIZED)
def test_int8_activations_stay_close_to_float32_ones(tmp_path, quant):
    path = write_tiny_llama(tmp_path / "m.gguf", quant=quant)
    token_ids = ids(20)
    floats, integers = (logits_of(Model.load(path, kernels=k), token_ids) for k in ("reference", "reference-int8"))
    error = np.abs(floats - integers).max() / np.abs(floats).max()
    # An activation is rounded to 1 in 254 of its block's largest; a wrong scale or min is off by far more.
    assert 0 < error < 0.05


def test_float16_cache_keeps_logits_within_two_hundredths(tmp_path):
    model = Model.load(write_tiny_llama(tmp_path / "m.gguf"), kernels="reference")
    exact, rounded = (logits_of(model, ids(60), dtype) for dtype in ("float32", "float16"))
    assert 0 < np.abs(exact - rounded).max() < 2e-2


def test_logits_come_for_the_last_rows_asked_for_in_row_order(tmp_path):
    model = Model.load(write_tiny_llama(tmp_path / "m.gguf"), kernels="reference")
    first, second, third = ids(5), ids(7, seed=1), ids(3, seed=2)
    cache = model.new_cache(3, 8)
    logits = model.forward([Chunk(2, 0, first, 2), Chunk(0, 0, second, 0), Chunk(1, 0, third, 1)], cache)
    assert logits.shape == (3, VOCAB)
    np.testing.assert_array_equal(logits[:2], logits_of(model, first, "float16")[-2:])
    np.testing.assert_array_equal(logits[2], logits_of(model, third, "float16")[-1])
    assert [cache.seq_len(slot=slot) for slot in range(3)] == [7, 3, 5]
    assert model.forward([Chunk(0, 7, (1,), 0)], cache).shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([], "at least one chunk"),
        ([Chunk(0, 5, (1,))], "starts at 5, the slot holds 4"),
        ([Chunk(0, -1, (1,))], "starts at -1"),
        ([Chunk(0, 4, (1,) * 5)], "ends at 9, max_len is 8"),
        ([Chunk(2, 0, (1,))], r"slot must be in \[0, 2\), got 2"),
        ([Chunk(-1, 0, (1,))], "got -1"),
        ([Chunk(0, 0, (1,)), Chunk(0, 1, (1,))], "two chunks"),
        ([Chunk(0, 0, ())], "0 tokens"),
        ([Chunk(0, 0, (1,), 2)], "1 tokens and wants 2"),
        ([Chunk(0, 0, (1,), -1)], "wants -1"),
        ([Chunk(0, 0, (1,)), Chunk(1, 1, (1,))], "the slot holds 0"),
    ],
)
def test_chunks_that_do_not_fit_are_refused_and_change_nothing(tmp_path, chunks, said):
    model = Model.load(write_tiny_llama(tmp_path / "m.gguf"), kernels="reference")
    cache = model.new_cache(2, 8)
    model.forward([Chunk(0, 0, ids(4))], cache)
    before = cache.fill.copy()
    with pytest.raises(CacheError, match=said):
        model.forward(chunks, cache)
    np.testing.assert_array_equal(cache.fill, before)


def test_a_row_that_is_not_finite_spoils_no_other(tmp_path):
    embedding = np.random.default_rng(0).standard_normal((VOCAB, 64)).astype(np.float32)
    embedding[7] = np.inf
    path = write_tiny_llama(tmp_path / "m.gguf", tied=False, tensors={"token_embd.weight": embedding})
    model = Model.load(path, kernels="reference")
    cache = model.new_cache(2, 8)
    logits = model.forward([Chunk(0, 0, (7, 8)), Chunk(1, 0, (5, 6))], cache)
    assert not np.isfinite(logits[0]).all()
    np.testing.assert_array_equal(logits[1], logits_of(model, (5, 6), "float16")[-1])
    # Nor does what it left behind in its slot.
    np.testing.assert_array_equal(model.forward([Chunk(0, 0, (5, 6))], cache)[0], logits[1])


def test_a_rotation_depends_on_the_position_alone():
    frequencies = 10000.0 ** (-np.arange(0, 10, 2) / 10)
    positions = np.array([3, 0, 8191, 77, 3])
    together = rotation(positions, frequencies)
    for row, position in enumerate(positions):
        alone = rotation(np.array([position]), frequencies)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a[row], b[0])


def test_rotation_turns_interleaved_pairs_and_leaves_what_is_beyond():
    turn = rotation(np.array([1]), np.array([np.pi / 2]))
    x = np.array([[[3.0, 4.0, 5.0]]], np.float32)
    np.testing.assert_allclose(rotate(x, turn), [[[-4, 3, 5]]], atol=1e-6)
    assert x.tolist() == [[[3, 4, 5]]]
