"""The one face of a kernel set.

The exactness contract: for one set, one KV dtype and one CPU path, the logits of a row depend only on the token ids at
positions 0..p of its own slot, bitwise: not on the other rows, the slot, chunk boundaries, threads, or whether
earlier positions were computed in this call or long ago.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from engine.batch import Chunk
from engine.config import ModelConfig
from engine.errors import CacheError
from engine.quants import Tensor

FloatArray = NDArray[np.float32]
TensorSource = Callable[[str], Tensor]
"""Name in the file -> the tensor in the internal form; raises `ModelFileError` naming a tensor that is not there."""


class Rows(NamedTuple):
    """A batch flattened to one entry a row: `token_ids`, `slots`, `positions` int64 [R], `wants_logits` bool [R]."""

    token_ids: NDArray[np.int64]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    wants_logits: NDArray[np.bool_]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "Rows":
        """The rows of `chunks`, in order."""
        per_chunk = np.array([(c.slot, c.start, len(c.token_ids), c.n_logits) for c in chunks], np.int64)
        slots, starts, lengths, n_logits = np.repeat(per_chunk, per_chunk[:, 2], axis=0).T
        token_ids = np.fromiter((t for chunk in chunks for t in chunk.token_ids), np.int64, len(slots))
        ends = per_chunk[:, 2].cumsum()
        in_chunk = np.arange(len(slots)) - np.repeat(ends - per_chunk[:, 2], per_chunk[:, 2])
        return cls(token_ids, slots, starts + in_chunk, in_chunk >= lengths - n_logits)


class Cache(Protocol):
    """Keys and values of every slot, and how far each slot is filled. The memory layout is the kernel set's own."""

    n_slots: int
    max_len: int

    def seq_len(self, layer: int | None = None, slot: int = 0) -> int:
        """Positions stored for `slot` in `layer`; without a layer the minimum over layers, i.e. what is committed."""

    def truncate(self, length: int, slot: int | None = None) -> None:
        """Forget every position >= `length` of `slot` (or of all slots), on every layer. Costs nothing."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make `target`'s first `length` positions equal `source`'s; what else `target` held is forgotten."""

    def nbytes(self) -> int:
        """Bytes by the formula 2 * S * L * max_len * Hkv * D * itemsize."""

    def nbytes_allocated(self) -> int:
        """Bytes this layout reserves (virtual: memory is touched only when used)."""


def begin(chunks: Sequence[Chunk], cache: Cache) -> None:
    """Make `cache` ready for `chunks`: whatever their slots held from their starts on is forgotten.

    Raises `CacheError`, having changed nothing, for a batch without chunks, a slot that does not exist or occurs twice,
    a chunk without tokens or with more logits than tokens, and one that would leave a gap or overflow its slot.
    """
    if not chunks:
        raise CacheError("a batch must have at least one chunk")
    seen: set[int] = set()
    for chunk in chunks:
        n = len(chunk.token_ids)
        if not 0 <= chunk.slot < cache.n_slots:
            raise CacheError(f"slot must be in [0, {cache.n_slots}), got {chunk.slot}")
        if chunk.slot in seen:
            raise CacheError(f"slot {chunk.slot} has two chunks in one batch")
        seen.add(chunk.slot)
        if not 0 <= chunk.n_logits <= n or n == 0:
            raise _misfit(chunk, f"has {n} tokens and wants {chunk.n_logits} logits")
        held = cache.seq_len(slot=chunk.slot)
        if not 0 <= chunk.start <= held:
            raise _misfit(chunk, f"starts at {chunk.start}, the slot holds {held} positions")
        if chunk.start + n > cache.max_len:
            raise _misfit(chunk, f"ends at {chunk.start + n}, max_len is {cache.max_len}")
    for chunk in chunks:
        cache.truncate(chunk.start, chunk.slot)


def _misfit(chunk: Chunk, why: str) -> CacheError:
    return CacheError(f"the chunk for slot {chunk.slot} {why}")


class KernelSet(Protocol):
    """`pack` weights once, then `forward` ragged batches against a cache of this set's own making."""

    name: str
    rounds_floats: bool
    """Whether `pack` rounds a file's float matrices to 8 bits."""
    cpu_path: str
    """What decides the bits beside the code: library versions and the CPU features in use."""

    def with_threads(self, threads: int) -> Self:
        """This set with `threads` threads, if it has a choice. Weights and caches may go from one to the other."""

    def pack(self, config: ModelConfig, tensors: TensorSource, progress: Callable[[float], None]) -> Any:
        """The model's weights in this set's layout. `progress` is called with the fraction done."""

    def new_cache(self, config: ModelConfig, n_slots: int, max_len: int, dtype: str) -> Cache:
        """An empty cache; `dtype` is "float32" or "float16"."""

    def forward(self, weights: Any, chunks: Sequence[Chunk], cache: Any) -> FloatArray:
        """Append the chunks to their slots and return float32 logits [rows that want them, V], in row order.

        Raises `CacheError`, having changed nothing, when a chunk would leave a gap or overflow its slot.
        """
