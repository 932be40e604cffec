"""What every cache of per-position rows has in common: two stores, fill counts, rollback."""

import mmap
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import CacheError

Stored = NDArray[Any]
"""Rows in the dtype of their cache, float32 or float16."""

_DTYPES: Mapping[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}


class SequenceCache:
    """Two arrays [L, B, ..., max_len, width] that grow along positions, filled up to `fill[layer, row]`.

    `shapes` are the two arrays' inner shapes, each as (..., width). Everything the caches of the engine promise holds
    here once: inputs are copied, a wrong shape or an overflow raises `CacheError` and changes nothing, memory is
    touched only when used.
    """

    def __init__(
        self, n_layers: int, batch: int, max_len: int, dtype: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        for name, size in (("n_layers", n_layers), ("batch", batch), ("max_len", max_len)):
            if size < 1:
                raise CacheError(f"{name} must be >= 1, got {size}")
        if dtype not in _DTYPES:
            raise CacheError(f"dtype must be one of {sorted(_DTYPES)}, got {dtype!r}")
        self.n_layers = n_layers
        self.n_slots = batch
        self.max_len = max_len
        self.dtype = _DTYPES[dtype]
        self.fill = np.zeros((n_layers, batch), np.int64)
        self._stores = tuple(
            _reserve((n_layers, batch, *inner[:-1], max_len, inner[-1]), self.dtype) for inner in shapes
        )

    def seq_len(self, layer: int | None = None, slot: int = 0) -> int:
        """Positions stored for `slot` in `layer`; without a layer the minimum over layers, i.e. what is committed."""
        fill = self.fill[:, slot].min() if layer is None else self.fill[layer, slot]
        return int(fill)

    def positions(self, t: int) -> NDArray[np.int64]:
        """The positions of the next `t` tokens, int64 [t]. Raises `CacheError` if they do not fit."""
        start = self.seq_len()
        self._check_room(start, t)
        return np.arange(start, start + t)

    def mask(self, t: int) -> NDArray[np.bool_]:
        """Which of the s + t keys each of the next `t` queries sees: bool [t, s + t], true where j <= s + i.

        Raises `CacheError` if they do not fit.
        """
        positions = self.positions(t)
        return np.arange(self.seq_len() + t) <= positions[:, None]

    def truncate(self, length: int, slot: int | None = None) -> None:
        """Forget every position >= `length` of `slot` (or of all slots), on every layer. Costs nothing.

        Raises `CacheError` if `length` is negative.
        """
        if length < 0:
            raise CacheError(f"length must be >= 0, got {length}")
        fill = self.fill if slot is None else self.fill[:, slot]
        np.minimum(fill, length, out=fill)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make `target`'s first `length` positions equal `source`'s; what else `target` held is forgotten.

        Raises `CacheError` if `source` does not hold as many, or one of the slots does not exist.
        """
        for name, slot in (("source", source), ("target", target)):
            if not 0 <= slot < self.n_slots:
                raise CacheError(f"{name} must be in [0, {self.n_slots}), got {slot}")
        held = self.seq_len(slot=source)
        if not 0 <= length <= held:
            raise CacheError(f"length must be in [0, {held}], the positions of slot {source}, got {length}")
        if source != target:
            for store in self._stores:
                store[:, target, ..., :length, :] = store[:, source, ..., :length, :]
        self.fill[:, target] = length

    def nbytes(self) -> int:
        """Bytes of all rows when full: the logical size."""
        return sum(store.nbytes for store in self._stores)

    def nbytes_allocated(self) -> int:
        """Bytes reserved (virtual: memory is touched only when used)."""
        return self.nbytes()

    def _extend(self, layer: int, new: tuple[NDArray[Any], NDArray[Any]]) -> tuple[Stored, Stored]:
        """Append `new` [B, ..., T, width] to every row of `layer`; returns read-only views of all that is stored."""
        first, second = self._stores
        start = int(self.fill[layer, 0])
        if (self.fill[layer] != start).any():
            raise CacheError(f"the rows of layer {layer} are filled to different lengths: {self.fill[layer].tolist()}")
        t = new[0].shape[-2] if new[0].ndim == first.ndim - 1 else 0
        for store, rows in zip(self._stores, new, strict=True):
            expected = (*store.shape[1:-2], t, store.shape[-1])
            if rows.shape != expected or t == 0:
                wanted = (*store.shape[1:-2], "T", store.shape[-1])
                raise CacheError(f"new rows must have shape {wanted} with the same T >= 1, got {rows.shape}")
        self._check_room(start, t)
        for store, rows in zip(self._stores, new, strict=True):
            store[layer, ..., start : start + t, :] = rows
        self.fill[layer] = start + t
        return _read_only(first[layer, ..., : start + t, :]), _read_only(second[layer, ..., : start + t, :])

    def _check_room(self, start: int, t: int) -> None:
        if t < 1 or start + t > self.max_len:
            raise CacheError(f"{t} positions from {start} on do not fit max_len {self.max_len}")


def _reserve(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Stored:
    """Zeros that cost no memory until they are written.

    numpy asks for huge pages for large arrays; the first row of every slot would then make a few pages of 4 KiB cost
    2 MiB each, so this asks the system for memory itself.
    """
    reserved = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        reserved.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(reserved, dtype).reshape(shape)


def _read_only(view: Stored) -> Stored:
    view.flags.writeable = False
    return view
