import numpy as np
import pytest

from engine.kernels.reference.attention import PARTITION, attend


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def naive(query, keys, values):
    query, keys, values = (a.astype(np.float64) for a in (query, keys, values))
    out = np.empty_like(query)
    for h, g in np.ndindex(query.shape[:2]):
        shares = np.exp(keys[h] @ query[h, g])
        out[h, g] = shares @ values[h] / shares.sum()
    return out


def at_offset(values, offset):
    """A copy of `values` that begins `offset` bytes after a cache line."""
    memory = np.empty(values.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + values.nbytes].view(np.float32).reshape(values.shape)
    copy[:] = values
    return copy


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 512, 513, 900])
@pytest.mark.parametrize("heads", [(1, 1, 8), (3, 3, 64), (2, 8, 12), (1, 1, 5)], ids=str)
def test_attention_is_softmax_times_values(length, heads):
    n_kv_heads, group, width = heads
    query = numbers(n_kv_heads, group, width) / np.float32(np.sqrt(width))
    keys, values = numbers(n_kv_heads, length, width, seed=1), numbers(n_kv_heads, length, width, seed=2)
    np.testing.assert_allclose(attend(query, keys, values), naive(query, keys, values), atol=2e-6)


def test_queries_share_their_kv_head_in_order():
    values = np.zeros((2, 1, 1), np.float32)
    values[1] = 1
    out = attend(np.ones((2, 2, 1), np.float32), np.ones((2, 1, 1), np.float32), values)
    assert out.reshape(-1).tolist() == [0, 0, 1, 1]


def test_scores_of_any_size_do_not_overflow():
    query, keys = np.full((1, 1, 4), 1e4, np.float32), np.zeros((1, 600, 4), np.float32)
    keys[0, [10, 300, 599], 0] = [9e3, 1e4, -1e4]
    values = np.arange(600, dtype=np.float32).reshape(1, 600, 1)
    assert attend(query, keys, values).item() == 300


@pytest.mark.parametrize("heads", [(3, 3, 64), (1, 8, 10), (2, 1, 7)], ids=str)
def test_attention_does_not_depend_on_where_keys_and_values_lie(heads):
    """Every length to beyond a partition: in a cache that is longer, in a copy, at any alignment."""
    n_kv_heads, group, width = heads
    query = numbers(n_kv_heads, group, width)
    keys, values = numbers(n_kv_heads, 300, width, seed=1), numbers(n_kv_heads, 300, width, seed=2)
    for length in range(1, PARTITION + 2):
        expected = attend(query, keys[:, :length], values[:, :length])
        offset = 4 * (length % 16)
        moved = attend(
            at_offset(query, 60 - offset),
            at_offset(keys[:, :length].copy(), offset),
            at_offset(values[:, :length].copy(), 64 - offset),
        )
        np.testing.assert_array_equal(moved, expected)
