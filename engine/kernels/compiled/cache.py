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


class BlockedCache:
    """Keys and values of `n_slots` slots of `max_len` positions; see `engine.kernels.protocol.Cache`."""

    def __init__(self, config: ModelConfig, n_slots: int, max_len: int, dtype: str) -> None:
        itemsize = {"float16": 2, "float32": 4}[dtype]
        self.n_slots = n_slots
        self.max_len = max_len
        self.head_shape = HeadShape(config.n_heads // config.n_kv_heads, round_up(config.d_head, LANES), itemsize)
        self._logical_position_bytes = 2 * config.n_layers * config.n_kv_heads * config.d_head * itemsize
        self.block_bytes = config.n_layers * config.n_kv_heads * self.head_shape.record_bytes
        self.slot_bytes = -(-max_len // BLOCK_POSITIONS) * self.block_bytes
        self._memory = allocate(n_slots * self.slot_bytes)
        self._fill = np.zeros(n_slots, np.int64)
        self.rotations = rotations(config, max_len)

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    def seq_len(self, layer: int | None = None, slot: int = 0) -> int:  # noqa: ARG002 - layers fill together here
        return int(self._fill[slot])

    def truncate(self, length: int, slot: int | None = None) -> None:
        which = slice(None) if slot is None else slot
        self._fill[which] = np.minimum(self._fill[which], length)

    def copy(self, source: int, target: int, length: int) -> None:
        """See the protocol; raises `CacheError` when `source` does not hold `length` positions."""
        if length > self._fill[source]:
            raise CacheError(f"slot {source} holds {self._fill[source]} positions, cannot copy {length}")
        used = -(-length // BLOCK_POSITIONS) * self.block_bytes
        start, end = source * self.slot_bytes, target * self.slot_bytes
        self._memory[end : end + used] = self._memory[start : start + used]
        self._fill[target] = length

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raise `CacheError` if a chunk names no slot, leaves a gap or overflows; a slot's chunks follow each other."""
        fill: dict[int, int] = {}
        for chunk in chunks:
            if not 0 <= chunk.slot < self.n_slots:
                raise CacheError(f"slot must be in [0, {self.n_slots - 1}], got {chunk.slot}")
            filled = int(fill.get(chunk.slot, self._fill[chunk.slot]))
            follows = chunk.start == filled if chunk.slot in fill else 0 <= chunk.start <= filled
            if not follows:
                raise CacheError(f"slot {chunk.slot} is filled up to {filled}, a chunk cannot start at {chunk.start}")
            end = chunk.start + len(chunk.token_ids)
            if end > self.max_len:
                raise CacheError(f"slot {chunk.slot} has {self.max_len} positions, a chunk cannot end at {end}")
            fill[chunk.slot] = end

    def commit(self, chunks: Sequence[Chunk]) -> None:
        """Set the fill to what `chunks` have written."""
        for chunk in chunks:
            self._fill[chunk.slot] = chunk.start + len(chunk.token_ids)

    def nbytes(self) -> int:
        return self.n_slots * self.max_len * self._logical_position_bytes

    def nbytes_allocated(self) -> int:
        return self._memory.nbytes


def rotations(config: ModelConfig, max_len: int) -> "np.ndarray[tuple[int, int, int], np.dtype[np.float32]]":
    """Cosines and signed sines, float32 [max_len, 2, padded head width]; see `forward._Jobs._rotate_and_append`."""
    angles = np.arange(max_len)[:, None] * config.rope.inverse_frequencies()
    table = np.zeros((max_len, 2, round_up(config.d_head, LANES)), np.float32)
    table[:, 0] = 1
    table[:, 0, : config.rope.dim] = np.repeat(np.cos(angles), 2, axis=1)
    table[:, 1, : config.rope.dim : 2] = -np.sin(angles)
    table[:, 1, 1 : config.rope.dim : 2] = np.sin(angles)
    return table
