"""The key/value cache as the compiled kernels read it.

Memory is [slot][block of 16 positions][layer][key/value head][record]: what a slot has not filled was never touched,
however large the cache; copying a prefix is one copy.
"""

from collections.abc import Sequence

import numpy as np

from engine.batch import Chunk
from engine.config import ModelConfig
from engine.errors import CacheError
from engine.kernels.compiled.attention import BLOCK_POSITIONS, HeadShape
from engine.kernels.compiled.formats import allocate, round_up
from engine.kernels.compiled.lang import LANES
from engine.kernels.protocol import FloatArray

_ITEMSIZES = {"float32": 4, "float16": 2}


class BlockedCache:
    """A `Cache` of `n_slots` slots of `max_len` positions in "float32" or "float16".

    Raises `CacheError` for a size below 1 or another dtype.
    """

    def __init__(self, config: ModelConfig, n_slots: int, max_len: int, dtype: str) -> None:
        for name, size in (("n_slots", n_slots), ("max_len", max_len)):
            if size < 1:
                raise CacheError(f"{name} must be >= 1, got {size}")
        if dtype not in _ITEMSIZES:
            raise CacheError(f"dtype must be one of {sorted(_ITEMSIZES)}, got {dtype!r}")
        itemsize = _ITEMSIZES[dtype]
        self.n_slots = n_slots
        self.max_len = max_len
        self.head_shape = HeadShape(config.n_heads // config.n_kv_heads, round_up(config.d_head, LANES), itemsize)
        self._logical_position_bytes = 2 * config.n_layers * config.n_kv_heads * config.d_head * itemsize
        self.block_bytes = config.n_layers * config.n_kv_heads * self.head_shape.record_bytes
        self.slot_bytes = -(-max_len // BLOCK_POSITIONS) * self.block_bytes
        self._memory = allocate(n_slots * self.slot_bytes)
        self._fill = [0] * n_slots
        self.rotations = rotations(config, max_len)

    @property
    def address(self) -> int:
        """Where the memory begins."""
        return int(self._memory.ctypes.data)

    def seq_len(self, layer: int | None = None, slot: int = 0) -> int:  # noqa: ARG002 - layers fill together here
        """Positions stored for `slot`, the same on every layer."""
        return self._fill[slot]

    def truncate(self, length: int, slot: int | None = None) -> None:
        """Forget every position >= `length` of `slot`, or of all; raises `CacheError` if `length` is negative."""
        if length < 0:
            raise CacheError(f"length must be >= 0, got {length}")
        for which in range(self.n_slots) if slot is None else (slot,):
            self._fill[which] = min(self._fill[which], length)

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
        used = -(-length // BLOCK_POSITIONS) * self.block_bytes
        start, end = source * self.slot_bytes, target * self.slot_bytes
        self._memory[end : end + used] = self._memory[start : start + used]
        self._fill[target] = length

    def commit(self, chunks: Sequence[Chunk]) -> None:
        """Set the fill to what `chunks` have written."""
        for chunk in chunks:
            self._fill[chunk.slot] = chunk.start + len(chunk.token_ids)

    def nbytes(self) -> int:
        """The logical size, 2 * S * L * max_len * Hkv * D * itemsize."""
        return self.n_slots * self.max_len * self._logical_position_bytes

    def nbytes_allocated(self) -> int:
        """Bytes reserved, whole blocks and padded heads; memory is touched only when used."""
        return self._memory.nbytes


def rotations(config: ModelConfig, max_len: int) -> FloatArray:
    """Cosines and signed sines, float32 [max_len, 2, padded head width]; see `row_jobs.rotate_and_append`."""
    angles = np.arange(max_len)[:, None] * config.rope.inverse_frequencies()
    table = np.zeros((max_len, 2, round_up(config.d_head, LANES)), np.float32)
    table[:, 0] = 1
    table[:, 0, : config.rope.dim] = np.repeat(np.cos(angles), 2, axis=1)
    table[:, 1, : config.rope.dim : 2] = -np.sin(angles)
    table[:, 1, 1 : config.rope.dim : 2] = np.sin(angles)
    return table
