"""The contract of every kernel set: a row's logits depend only on the token ids at positions 0..p of its request."""

import functools
import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Chunk
from engine.model import Model
from tests.tiny_model import write_tiny_llama

VOCAB = 263
NAMES = ("reference", "reference-int8", "compiled")
KERNELS = {**{name: (name, "auto") for name in NAMES}, "compiled, weights kept": ("compiled", "f32")}
SHAPES = {
    "no groups": {"n_heads": 2, "n_kv_heads": 2, "quant": "Q4_1"},
    "groups of 3": {"d_model": 96, "n_heads": 3, "n_kv_heads": 1, "quant": "Q8_0"},
    "groups of 8, mixed head width": {"n_heads": 16, "n_kv_heads": 2, "d_head": 12, "quant": "Q5_0"},
    "odd sizes": {"d_model": 37, "n_heads": 3, "n_kv_heads": 1, "d_head": 10, "d_ff": 53, "quant": "F32"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {
        name: write_tiny_llama(folder / f"{index}.gguf", **shape) for index, (name, shape) in enumerate(SHAPES.items())
    }
    yield {
        (name, title): Model.load(path, kernels=kernels, weights=weights)
        for name, path in paths.items()
        for title, (kernels, weights) in KERNELS.items()
    }
    solo.cache_clear()


def prompt(seed, length):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


@functools.cache
def solo(model, token_ids, dtype):
    """The logits of every position, from one forward over a cache of its own."""
    return model.forward([Chunk(0, 0, token_ids, len(token_ids))], model.new_cache(1, len(token_ids), dtype))


TICKS = st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 19)), min_size=1, max_size=5), max_size=12)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=15, deadline=None)
@given(ticks=TICKS, dtype=st.sampled_from(["float32", "float16"]))
def test_any_mix_of_chunks_and_slots_gives_each_request_what_it_gets_alone(models, shape, kernels, ticks, dtype):
    """Five slots advance by chunks of any size; a slot whose request is done starts another one."""
    model = models[shape, kernels]
    cache = model.new_cache(5, 40, dtype)
    requests = [prompt(slot, 33) for slot in range(5)]
    expected = [solo(model, token_ids, dtype) for token_ids in requests]
    for tick in ticks:
        chunks = []
        for slot, n in dict(tick).items():
            start = cache.seq_len(slot=slot)
            if start == len(requests[slot]):
                requests[slot] = prompt(requests[slot][0] + 100, 20 + slot)
                expected[slot] = solo(model, requests[slot], dtype)
                start = 0
            token_ids = requests[slot][start : start + n]
            chunks.append(Chunk(slot, start, token_ids, len(token_ids)))
        logits = model.forward(chunks, cache)
        row = 0
        for chunk in chunks:
            end = chunk.start + chunk.n_logits
            np.testing.assert_array_equal(
                logits[row : row + chunk.n_logits], expected[chunk.slot][chunk.start : end], strict=True
            )
            row += chunk.n_logits


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_copied_slot_continues_as_its_source_would(models, kernels, dtype):
    model = models["groups of 3", kernels]
    token_ids, other = prompt(1, 24), prompt(2, 30)
    expected = solo(model, token_ids, dtype)
    cache = model.new_cache(3, 32, dtype)
    model.forward([Chunk(0, 0, token_ids[:20]), Chunk(2, 0, other)], cache)
    cache.copy(0, 2, 17)
    logits = model.forward([Chunk(2, 17, token_ids[17:], 7), Chunk(0, 20, token_ids[20:], 4)], cache)
    np.testing.assert_array_equal(logits[:7], expected[17:])
    np.testing.assert_array_equal(logits[7:], expected[20:])


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_slot_taken_back_continues_as_if_it_had_never_gone_on(models, kernels):
    model = models["odd sizes", kernels]
    token_ids = prompt(1, 24)
    expected = solo(model, token_ids, "float16")
    cache = model.new_cache(1, 40, "float16")
    model.forward([Chunk(0, 0, token_ids[:10] + prompt(2, 30))], cache)
    np.testing.assert_array_equal(model.forward([Chunk(0, 10, token_ids[10:], 14)], cache), expected[10:])


@pytest.mark.parametrize("kernels", NAMES)
def test_positions_beyond_a_partition_of_attention_are_as_exact(tmp_path, kernels):
    """Positions 256 and 512 begin new partitions; the chunks end before, at and after them."""
    path = write_tiny_llama(tmp_path / "m.gguf", n_layers=1, d_model=32, n_heads=2, n_kv_heads=1, quant="Q8_0",
                            max_context=1024)  # fmt: skip
    model = Model.load(path, kernels=kernels)
    token_ids = prompt(1, 530)
    expected = solo(model, token_ids, "float16")
    cache = model.new_cache(2, 600, "float16")
    edges = (0, 200, 255, 256, 257, 300, 511, 512, 513, 530)
    for start, end in itertools.pairwise(edges):
        chunk = token_ids[start:end]
        logits = model.forward([Chunk(0, 0, prompt(2, 3)), Chunk(1, start, chunk, len(chunk))], cache)
        np.testing.assert_array_equal(logits[1:], expected[start:end])


_DIGESTS_OF_LOGITS = """
import hashlib, sys
from engine.batch import Chunk
from engine.model import Model
for kernels in sys.argv[2:]:
    model = Model.load(sys.argv[1], kernels=kernels)
    logits = model.forward([Chunk(0, 0, tuple(range(100)), 100)], model.new_cache(1, 100))
    print(hashlib.sha256(logits.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_another_process_with_another_number_of_threads_gives_the_same_bits(tmp_path):
    path = write_tiny_llama(tmp_path / "m.gguf", quant="Q4_K", n_layers=1)
    ours = []
    for kernels in NAMES:
        logits = solo(Model.load(path, kernels=kernels), tuple(range(100)), "float16")
        ours.append(hashlib.sha256(logits.tobytes()).hexdigest())
    for threads in ("1", "2"):
        theirs = subprocess.run(
            [sys.executable, "-c", _DIGESTS_OF_LOGITS, str(path), *NAMES],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        assert theirs == ours
