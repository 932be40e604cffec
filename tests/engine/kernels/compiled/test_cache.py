import numpy as np
import psutil
import pytest

from engine.errors import CacheError
from engine.kernels.compiled.cache import BlockedCache
from tests.engine.kernels.compiled.test_kernel_set import Chunk, CompiledKernels, Loaded, prompt
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Loaded(CompiledKernels(), write_tiny_llama(tmp_path_factory.mktemp("m") / "m.gguf", quant="Q8_0"))


def test_sizes_are_those_of_the_formula_and_of_whole_blocks(model):
    cache = BlockedCache(model.config, 3, 20, "float16")
    assert cache.nbytes() == 2 * 3 * 2 * 20 * 2 * 16 * 2
    assert cache.nbytes_allocated() >= 2 * 3 * 2 * 32 * 2 * 16 * 2


@pytest.mark.parametrize(("n_slots", "max_len", "dtype"), [(0, 8, "float16"), (1, 0, "float16"), (1, 8, "int8")])
def test_impossible_caches_are_refused(model, n_slots, max_len, dtype):
    with pytest.raises(CacheError, match=r"must be"):
        BlockedCache(model.config, n_slots, max_len, dtype)


def test_memory_is_touched_only_where_positions_are_written(model):
    process = psutil.Process()
    before = process.memory_info().rss
    cache = model.cache(256, 32768, "float32")
    model.forward([Chunk(slot, 0, prompt(3)) for slot in range(0, 256, 64)], cache)
    assert cache.nbytes_allocated() > 1 << 31
    assert process.memory_info().rss - before < 1 << 27


def test_a_copy_needs_what_it_copies(model):
    cache = model.cache(2, 32)
    model.forward([Chunk(0, 0, prompt(5))], cache)
    with pytest.raises(CacheError, match="length must be in"):
        cache.copy(0, 1, 6)
    with pytest.raises(CacheError, match="target must be in"):
        cache.copy(0, 2, 1)
    cache.copy(0, 1, 5)
    assert [cache.seq_len(slot=1), cache.seq_len(0, 1)] == [5, 5]


def test_truncate_forgets_on_one_slot_or_on_all(model):
    cache = model.cache(2, 32)
    model.forward([Chunk(0, 0, prompt(9)), Chunk(1, 0, prompt(9))], cache)
    cache.truncate(4, 1)
    assert [cache.seq_len(slot=s) for s in (0, 1)] == [9, 4]
    cache.truncate(2)
    assert [cache.seq_len(slot=s) for s in (0, 1)] == [2, 2]
    with pytest.raises(CacheError, match="length"):
        cache.truncate(-1)


def test_a_refused_forward_changes_nothing(model):
    cache = model.cache(2, 16)
    model.forward([Chunk(0, 0, prompt(9))], cache)
    with pytest.raises(CacheError):
        model.forward([Chunk(0, 4, prompt(2)), Chunk(1, 3, prompt(2))], cache)
    assert [cache.seq_len(slot=s) for s in (0, 1)] == [9, 0]
    whole = model.all_logits(prompt(9) + prompt(3))
    np.testing.assert_array_equal(model.forward([Chunk(0, 9, prompt(3), 3)], cache), whole[9:])
