"""Keys and values of every position computed so far."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.sequence_cache import SequenceCache, Stored


class KVCache(SequenceCache):
    """The attention cache: per layer and slot, `n_kv_heads` keys and values of width `d_head` at each position.

    Two faces. One sequence (or `batch` of equal length): `positions` and `mask`, then `update` layer by layer. Ragged
    slots: `append` and `read`. A layer's fill grows as its rows are written and the committed length, `seq_len()`, is
    the minimum, so a forward that fails half-way has committed nothing. K/V heads are never expanded for grouped
    queries. Raises `CacheError` for a size below 1 or a dtype other than float32 and float16.
    """

    def __init__(  # noqa: PLR0917 - the order of the array's dimensions is worth knowing by heart
        self, n_layers: int, n_kv_heads: int, d_head: int, max_len: int, batch: int = 1, dtype: str = "float32"
    ) -> None:
        super().__init__(n_layers, batch, max_len, dtype, ((n_kv_heads, d_head), (n_kv_heads, d_head)))
        self._keys, self._values = self._stores

    def update(self, layer: int, k_new: NDArray[Any], v_new: NDArray[Any]) -> tuple[Stored, Stored]:
        """Append [B, Hkv, T, D] of each; returns all stored keys and values of `layer`, [B, Hkv, s + T, D] each.

        They are read-only views in the cache's dtype, the new rows included. Raises `CacheError`, having changed
        nothing, for another shape, an overflow, or rows filled to different lengths.
        """
        return self._extend(layer, (k_new, v_new))

    def append(
        self,
        layer: int,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """Write one row each: `slots` and `positions` [R], `keys` and `values` [R, Hkv, D].

        The positions of a slot ascend from its fill on: the kernels' `begin` has checked it.
        """
        self._keys[layer, slots, :, positions] = keys
        self._values[layer, slots, :, positions] = values
        self.fill[layer, slots] = positions + 1

    def read(self, layer: int, slot: int, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The first `length` keys and values of one slot as float32, [Hkv, length, D] each, not to be written to."""
        keys, values = self._keys[layer, slot, :, :length], self._values[layer, slot, :, :length]
        return keys.astype(np.float32, copy=False), values.astype(np.float32, copy=False)
