import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CacheError
from engine.kv_cache import KVCache

DTYPES = ("float32", "float16")


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(length, *, n_layers=2, max_len=8, batch=1, dtype="float32"):
    """A cache whose every layer and row holds `length` positions, and the keys and values that went in."""
    cache = KVCache(n_layers, 2, 4, max_len, batch=batch, dtype=dtype)
    written = [
        (rows(batch, 2, length, 4, seed=2 * layer), rows(batch, 2, length, 4, seed=2 * layer + 1))
        for layer in range(n_layers)
    ]
    for layer, (k, v) in enumerate(written):
        cache.update(layer, k, v)
    return cache, written


def snapshot(cache):
    return cache.fill.copy(), *(store.copy() for store in cache._stores)


def assert_unchanged(cache, before):
    for now, then in zip(snapshot(cache), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_worked_example_prefill_of_two_then_one():
    cache = KVCache(1, 1, 2, 4)
    assert cache.nbytes() == 64
    assert cache.mask(2).tolist() == [[True, False], [True, True]]
    k, v = cache.update(0, np.array([[[[1, 2], [3, 4]]]]), np.array([[[[-1, -2], [-3, -4]]]]))
    assert k.tolist() == [[[[1, 2], [3, 4]]]]
    assert v.tolist() == [[[[-1, -2], [-3, -4]]]]
    assert cache.seq_len() == 2
    assert cache.positions(1).tolist() == [2]
    k, v = cache.update(0, np.array([[[[5, 6]]]]), np.array([[[[-5, -6]]]]))
    assert k.tolist() == [[[[1, 2], [3, 4], [5, 6]]]]
    assert v.tolist() == [[[[-1, -2], [-3, -4], [-5, -6]]]]
    assert cache.seq_len() == 3
    assert cache.mask(1).tolist() == [[True, True, True, True]]


def test_size_is_two_times_batch_layers_positions_heads_width_itemsize():
    assert KVCache(4, 2, 32, 128).nbytes() == 256 * 1024
    assert KVCache(4, 2, 32, 128, dtype="float16").nbytes() == 128 * 1024
    assert KVCache(4, 2, 32, 128, batch=3).nbytes() == 3 * 256 * 1024
    assert KVCache(4, 2, 32, 128).nbytes_allocated() == 256 * 1024


def test_mask_lets_a_query_see_its_past_and_itself():
    cache, _ = filled(3)
    expected = [[j <= 3 + i for j in range(3 + 4)] for i in range(4)]
    assert cache.mask(4).tolist() == expected
    assert cache.positions(4).tolist() == [3, 4, 5, 6]


def test_seq_len_moves_only_after_the_last_layer():
    cache, _ = filled(3)
    cache.update(0, rows(1, 2, 2, 4), rows(1, 2, 2, 4))
    assert (cache.seq_len(0), cache.seq_len(1), cache.seq_len()) == (5, 3, 3)
    cache.update(1, rows(1, 2, 2, 4), rows(1, 2, 2, 4))
    assert cache.seq_len() == 5


def test_inputs_are_copied_and_what_is_returned_cannot_be_written_to():
    cache = KVCache(1, 2, 4, 8)
    k, v = rows(1, 2, 3, 4, seed=1), rows(1, 2, 3, 4, seed=2)
    k_kept = k.copy()
    returned, _ = cache.update(0, k, v)
    k[:] = 7
    np.testing.assert_array_equal(returned, k_kept)
    with pytest.raises(ValueError, match="read-only"):
        returned[:] = 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_is_returned_the_new_rows_included(dtype):
    cache = KVCache(1, 2, 4, 8, dtype=dtype)
    k, v = rows(1, 2, 3, 4, seed=1), rows(1, 2, 3, 4, seed=2)
    stored_k, stored_v = cache.update(0, k, v)
    assert stored_k.dtype == stored_v.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(stored_k, k.astype(dtype))
    np.testing.assert_array_equal(stored_v, v.astype(dtype))
    read_k, read_v = cache.read(0, 0, 3)
    assert read_k.dtype == read_v.dtype == np.float32
    np.testing.assert_array_equal(read_k, stored_k[0])
    np.testing.assert_array_equal(read_v, stored_v[0])


@pytest.mark.parametrize(
    ("k_shape", "v_shape"),
    [
        ((1, 2, 6, 4), (1, 2, 6, 4)),  # 3 + 6 > 8
        ((1, 2, 0, 4), (1, 2, 0, 4)),
        ((2, 2, 1, 4), (2, 2, 1, 4)),
        ((1, 3, 1, 4), (1, 3, 1, 4)),
        ((1, 2, 1, 5), (1, 2, 1, 5)),
        ((1, 2, 1, 4), (1, 2, 2, 4)),
        ((1, 2, 2, 4), (1, 2, 1, 4)),
        ((1, 2, 1, 4), (1, 2, 1, 3)),
        ((2, 1, 4), (2, 1, 4)),
        ((4,), (4,)),
        ((), ()),
        ((1, 1, 2, 1, 4), (1, 1, 2, 1, 4)),
    ],
)
def test_a_wrong_shape_or_an_overflow_is_refused_and_changes_nothing(k_shape, v_shape):
    cache, _ = filled(3)
    before = snapshot(cache)
    with pytest.raises(CacheError):
        cache.update(1, np.ones(k_shape), np.ones(v_shape))
    assert_unchanged(cache, before)


def test_positions_and_mask_beyond_the_end_are_refused():
    cache, _ = filled(3)
    for face in (cache.positions, cache.mask):
        face(5)
        for t in (0, 6):
            with pytest.raises(CacheError, match="max_len 8"):
                face(t)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"n_layers": 0}, "n_layers"),
        ({"batch": 0}, "batch"),
        ({"max_len": -1}, "max_len"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes, named):
    with pytest.raises(CacheError, match=named):
        KVCache(**({"n_layers": 1, "n_kv_heads": 1, "d_head": 2, "max_len": 4} | sizes))


def test_truncate_then_append_equals_never_having_appended():
    straight, _ = filled(3)
    detour, _ = filled(3)
    for layer in range(2):
        detour.update(layer, rows(1, 2, 4, 4, seed=50), rows(1, 2, 4, 4, seed=51))
    detour.truncate(3)
    assert detour.seq_len() == 3
    for layer in range(2):
        k, v = rows(1, 2, 2, 4, seed=60 + layer), rows(1, 2, 2, 4, seed=70 + layer)
        for a, b in zip(straight.update(layer, k, v), detour.update(layer, k, v), strict=True):
            np.testing.assert_array_equal(a, b)


def test_truncate_reaches_every_layer_never_lengthens_and_refuses_a_negative_length():
    cache, _ = filled(3)
    cache.update(0, rows(1, 2, 2, 4), rows(1, 2, 2, 4))
    cache.truncate(7)
    assert cache.fill.tolist() == [[5], [3]]
    cache.truncate(2)
    assert cache.fill.tolist() == [[2], [2]]
    with pytest.raises(CacheError, match="length"):
        cache.truncate(-1)


def test_truncating_one_slot_leaves_the_others():
    cache, written = filled(3, batch=3)
    cache.truncate(1, 1)
    assert cache.fill.tolist() == [[3, 1, 3]] * 2
    np.testing.assert_array_equal(cache.read(1, 2, 3)[0], written[1][0][2])


def test_batched_rows_of_different_lengths_are_refused_by_update():
    cache, _ = filled(3, batch=2)
    cache.truncate(1, 1)
    before = snapshot(cache)
    with pytest.raises(CacheError, match=r"different lengths: \[3, 1\]"):
        cache.update(0, rows(2, 2, 1, 4), rows(2, 2, 1, 4))
    assert_unchanged(cache, before)


def test_copy_makes_the_target_start_like_the_source_and_forgets_the_rest():
    cache, written = filled(5, batch=3)
    cache.copy(0, 2, 3)
    assert cache.fill.tolist() == [[5, 5, 3]] * 2
    for layer, (k, v) in enumerate(written):
        np.testing.assert_array_equal(cache.read(layer, 2, 3)[0], k[0, :, :3])
        np.testing.assert_array_equal(cache.read(layer, 2, 3)[1], v[0, :, :3])
        np.testing.assert_array_equal(cache.read(layer, 1, 5)[0], k[1])
        np.testing.assert_array_equal(cache.read(layer, 0, 5)[0], k[0])


@pytest.mark.parametrize(("source", "target", "length"), [(0, 1, 4), (0, 1, -1), (-1, 1, 1), (0, 2, 1), (2, 0, 1)])
def test_copying_what_is_not_there_is_refused_and_changes_nothing(source, target, length):
    cache, _ = filled(3, batch=2)
    before = snapshot(cache)
    with pytest.raises(CacheError):
        cache.copy(source, target, length)
    assert_unchanged(cache, before)


def test_ragged_append_equals_update_slot_by_slot():
    ragged, plain = KVCache(1, 2, 4, 8, batch=3), [KVCache(1, 2, 4, 8) for _ in range(3)]
    plan = [(2, range(4)), (0, range(2))], [(0, range(2, 3)), (1, range(1)), (2, range(4, 6))]
    for step, chunks in enumerate(plan):
        slots = np.array([slot for slot, positions in chunks for _ in positions])
        positions = np.array([p for _, positions in chunks for p in positions])
        k, v = rows(len(slots), 2, 4, seed=step), rows(len(slots), 2, 4, seed=10 + step)
        ragged.append(0, slots, positions, k, v)
        for slot, _ in chunks:
            mine = slots == slot
            plain[slot].update(0, k[mine].transpose(1, 0, 2)[None], v[mine].transpose(1, 0, 2)[None])
    for slot, cache in enumerate(plain):
        length = cache.seq_len()
        assert ragged.seq_len(slot=slot) == length
        for a, b in zip(ragged.read(0, slot, length), cache.read(0, 0, length), strict=True):
            np.testing.assert_array_equal(a, b)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_a_cache_is_a_list_of_rows_under_any_sequence_of_appends_and_truncations(data, dtype):
    cache = KVCache(2, 2, 3, 12, dtype=dtype)
    model = np.zeros((1, 2, 0, 3), np.float32)
    for step in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            t = data.draw(st.integers(1, 14))
            new = rows(1, 2, t, 3, seed=step)
            if model.shape[2] + t > 12:
                with pytest.raises(CacheError):
                    cache.update(0, new, new)
                continue
            model = np.concatenate([model, new.astype(dtype)], axis=2)
            for layer in range(2):
                k, v = cache.update(layer, new, -new)
                np.testing.assert_array_equal(k, model)
                np.testing.assert_array_equal(v, -model)
        else:
            n = data.draw(st.integers(0, 12))
            cache.truncate(n)
            model = model[:, :, :n]
        assert cache.seq_len() == model.shape[2]


@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory from /proc")
def test_a_large_cache_costs_memory_only_where_it_was_written():
    script = """
import numpy as np
from pathlib import Path
from engine.kv_cache import KVCache

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident()
cache = KVCache(30, 3, 64, 2048, batch=32, dtype="float16")
assert cache.nbytes() == 2 * 32 * 30 * 2048 * 3 * 64 * 2
empty = resident()
slots, positions = np.arange(32), np.zeros(32, np.int64)
for layer in range(30):
    cache.append(layer, slots, positions, np.ones((32, 3, 64)), np.ones((32, 3, 64)))
print(empty - before, resident() - before)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    empty, one_position_everywhere = map(int, out.split())
    # 1.5 GB when full. One position is one page in each of 2 * 30 * 32 * 3 runs of positions: 24 MB.
    assert empty < 4e6
    assert one_position_everywhere < 32e6
