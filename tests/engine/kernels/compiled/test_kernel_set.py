"""The compiled forward as a whole: against the reference, across threads and CPU paths, in batches of any size."""

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Chunk
from engine.config import ModelConfig
from engine.gguf import GGUFFile
from engine.kernels.compiled import CompiledKernels, isa
from engine.kernels.compiled.kernel_set import MAX_ROWS
from engine.kernels.compiled.sampling import largest
from engine.kernels.reference import ReferenceKernels
from engine.quants import unpack
from tests.engine.kernels.compiled.native import PATHS
from tests.random_blocks import QUANTIZED
from tests.tiny_model import write_tiny_llama

VOCAB = 263


class Loaded:
    """A kernel set with a model in it."""

    def __init__(self, kernels, path):
        self.kernels = kernels
        with GGUFFile.open(path) as file:
            self.config = ModelConfig.from_gguf(file)
            self.weights = kernels.pack(self.config, lambda name: self._tensor(file, name), lambda _: None)

    @staticmethod
    def _tensor(file, name):
        info = file.tensors[name]
        return unpack(info.type_id, file.data(name), info.shape)

    def cache(self, n_slots, max_len, dtype="float32"):
        return self.kernels.new_cache(self.config, n_slots, max_len, dtype)

    def forward(self, chunks, cache):
        return self.kernels.forward(self.weights, chunks, cache)

    def all_logits(self, token_ids, dtype="float32"):
        return self.forward([Chunk(0, 0, token_ids, len(token_ids))], self.cache(1, len(token_ids), dtype))


def prompt(length, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


@pytest.mark.parametrize("quant", QUANTIZED)
def test_logits_are_those_of_the_reference_with_the_same_int8_activations(tmp_path, quant):
    """The same integers, floats summed in another order.

    Rounding differs by some 1e-6 of a value; where that moves an activation over a rounding edge of its 8 bits, the
    step of 1/127 of its block is seen in the logits, whose size is around 1.
    """
    path = write_tiny_llama(tmp_path / "m.gguf", quant=quant)
    expected = Loaded(ReferenceKernels("int8"), path).all_logits(prompt(40))
    actual = Loaded(CompiledKernels(), path).all_logits(prompt(40))
    error = np.abs(actual - expected)
    assert np.median(error) < 2e-3 * expected.std()
    assert error.max() < 0.1 * expected.std()


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("sizes", [{}, {"d_model": 37, "n_heads": 3, "n_kv_heads": 1, "d_head": 10, "d_ff": 53}])
def test_float_weights_rounded_to_8_bits_stay_close_to_the_float_model(tmp_path, quant, sizes):
    path = write_tiny_llama(tmp_path / "m.gguf", quant=quant, **sizes)
    expected = Loaded(ReferenceKernels(), path).all_logits(prompt(40))
    actual = Loaded(CompiledKernels(), path).all_logits(prompt(40))
    assert np.sqrt(np.mean((actual - expected) ** 2)) < 0.06 * expected.std()


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("sizes", [{}, {"d_model": 37, "n_heads": 3, "n_kv_heads": 1, "d_head": 10, "d_ff": 53}])
def test_float_weights_that_are_kept_leave_only_the_rounding_of_activations(tmp_path, quant, sizes):
    path = write_tiny_llama(tmp_path / "m.gguf", quant=quant, **sizes)
    expected = Loaded(ReferenceKernels(), path).all_logits(prompt(40))
    errors = [
        np.sqrt(np.mean((Loaded(CompiledKernels(rounds_floats=rounds), path).all_logits(prompt(40)) - expected) ** 2))
        for rounds in (True, False)
    ]
    assert errors[1] < min(errors[0], 0.04 * expected.std())


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_head_of_its_own_is_used(tmp_path, tied):
    path = write_tiny_llama(tmp_path / "m.gguf", quant="Q8_0", tied=tied)
    expected = Loaded(ReferenceKernels("int8"), path).all_logits(prompt(9))
    np.testing.assert_allclose(Loaded(CompiledKernels(), path).all_logits(prompt(9)), expected, atol=0.05)


@pytest.mark.slow
def test_every_path_runs_the_whole_forward_and_fused_ones_agree_bit_for_bit(tmp_path):
    path = write_tiny_llama(tmp_path / "m.gguf", quant="Q4_1", n_layers=2)
    logits = {name: Loaded(CompiledKernels(path=isa.named(name)), path).all_logits(prompt(30), "float16")
              for name in PATHS}  # fmt: skip
    native = Loaded(CompiledKernels(), path).all_logits(prompt(30), "float16")
    for name, actual in logits.items():
        if name != "plain" and isa.detect().name != "plain":
            np.testing.assert_array_equal(actual, native)
        np.testing.assert_allclose(actual, native, atol=0.05 * native.std())


@pytest.fixture(scope="module")
def by_threads(tmp_path_factory):
    path = write_tiny_llama(tmp_path_factory.mktemp("m") / "m.gguf", quant="Q4_0", n_heads=6, n_kv_heads=2, d_head=16)
    return {threads: Loaded(CompiledKernels(threads=threads), path) for threads in (1, 2, 3, 7)}


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=32), seed=st.integers(0, 999))
def test_any_number_of_threads_gives_the_same_bits(by_threads, lengths, seed):
    chunks = [Chunk(slot, 0, prompt(n, seed + slot), n) for slot, n in enumerate(lengths)]
    results = [m.forward(chunks, m.cache(len(lengths), 70)) for m in by_threads.values()]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_a_batch_of_more_rows_than_the_workspace_holds_is_the_same_as_small_ones(by_threads):
    model = by_threads[2]
    lengths = [MAX_ROWS - 3, MAX_ROWS, 7]
    prompts = [prompt(n, n) for n in lengths]
    cache = model.cache(3, MAX_ROWS)
    together = model.forward([Chunk(slot, 0, ids, 5) for slot, ids in enumerate(prompts)], cache)
    for slot, ids in enumerate(prompts):
        alone = model.forward([Chunk(0, 0, ids, 5)], model.cache(1, MAX_ROWS))
        np.testing.assert_array_equal(together[5 * slot : 5 * slot + 5], alone)


def test_logits_of_one_forward_survive_the_next(by_threads):
    model = by_threads[2]
    cache = model.cache(2, 20)
    first = model.forward([Chunk(0, 0, prompt(5))], cache)
    kept = first.copy()
    model.forward([Chunk(1, 0, prompt(9, seed=3))], cache)
    np.testing.assert_array_equal(first, kept)


def test_forwards_from_several_threads_take_turns(by_threads):
    model = by_threads[3]
    expected = [model.all_logits(prompt(30, seed)) for seed in range(4)]
    wrong = []

    def ask(seed):
        answers = [model.all_logits(prompt(30, seed)) for _ in range(10)]
        wrong.extend(seed for answer in answers if not np.array_equal(answer, expected[seed]))

    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert not wrong


def test_what_is_not_finite_stays_in_its_own_row_and_is_seen(tmp_path):
    """Not turned into a plausible number by the rounding to 8 bits, nor by the softmax."""
    embedding = np.random.default_rng(0).normal(0, 1, (VOCAB, 64)).astype(np.float32)
    for token_id, number in ((7, np.nan), (8, np.inf)):
        embedding[token_id, 40] = number
    path = write_tiny_llama(tmp_path / "m.gguf", tied=False, tensors={"token_embd.weight": embedding})
    model = Loaded(CompiledKernels(), path)
    sound = prompt(20)
    sound = tuple(id_ for id_ in sound if id_ not in {7, 8})
    alone = model.all_logits(sound)
    for poison in (7, 8):
        cache = model.cache(2, 32)
        logits = model.forward([Chunk(0, 0, (1, poison, 2), 3), Chunk(1, 0, sound, len(sound))], cache)
        np.testing.assert_array_equal(logits[3:], alone)
        # What comes after it attends to it.
        assert largest(logits[:3]).tolist() == [alone_argmax(model, 1), -1, -1]


def alone_argmax(model, token_id):
    return int(model.all_logits((token_id,))[0].argmax())


def test_worker_threads_end_with_their_kernel_set():
    before = set(threading.enumerate())
    kernels = CompiledKernels(threads=4)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 3
    del kernels
    gc.collect()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()


def test_the_largest_of_each_row_that_forward_returns(by_threads):
    logits = by_threads[1].all_logits(prompt(20))
    assert logits.shape == (20, VOCAB)
    np.testing.assert_array_equal(largest(logits), logits.argmax(axis=1))
