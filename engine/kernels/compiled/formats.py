"""Weights in tiles: what the matrix-product kernels read, and how a tensor becomes it.

A tile is 16 output rows. Its codes come first, in blocks of 32 along K; within a block, byte 4 * row + i of 64 is the
code of k = 4 * j + i, so that one 64-byte load holds four consecutive codes of each row: what one dot-product
instruction eats. Codes of 4 bits share their bytes with the codes 16 k further on. After all codes come all scales
([block][group][row]), then, unless the codes have a constant offset, all mins; each part starts on a cache line.

A tile of floats is float32 [k][row].
"""

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.quants import Quantized, Tensor

TILE = 16
BLOCK = 32
CACHE_LINE = 64
_OFFSETS = (4, 8, 16, 32, 128)
"""Code that stands for zero in the symmetric formats; powers of two, so that kernels shift."""


@dataclass(frozen=True)
class TileFormat:
    """How a matrix's tiles are stored, as far as kernels differ by it.

    w = scale * (code - offset), or with `offset` None w = scale * code + min. Scales and mins are float16 where that
    loses nothing, else float32. `FLOATS` are weights as they are: the codes, so to speak, of 32 bits.
    """

    bits: int
    group: int
    offset: int | None
    scale_bytes: int

    @property
    def name(self) -> str:
        """The compiled module's name."""
        if self == FLOATS:
            return "float32"
        offset = "min" if self.offset is None else f"minus{self.offset}"
        return f"codes{self.bits}_groups{self.group}_{offset}_scales{8 * self.scale_bytes}"

    @property
    def groups(self) -> int:
        """Groups in a block."""
        return BLOCK // self.group

    @property
    def block_code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return TILE * BLOCK * self.bits // 8

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of a block's scales, or mins."""
        return TILE * self.groups * self.scale_bytes

    def scales_start(self, blocks: int) -> int:
        """Offset of the scales in a tile that is `blocks` long."""
        return blocks * self.block_code_bytes

    def mins_start(self, blocks: int) -> int:
        """Offset of the mins."""
        return self.scales_start(blocks) + round_up(blocks * self.block_scale_bytes, CACHE_LINE)

    def tile_bytes(self, blocks: int) -> int:
        """Bytes of a whole tile."""
        end = self.mins_start(blocks)
        return end if self.offset is not None else end + round_up(blocks * self.block_scale_bytes, CACHE_LINE)


FLOATS = TileFormat(bits=32, group=BLOCK, offset=0, scale_bytes=0)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A packed matrix: `n_tiles` tiles, each `blocks` blocks long, in `data`."""

    format: TileFormat
    data: NDArray[np.uint8]
    n_tiles: int
    blocks: int

    @property
    def tile_bytes(self) -> int:
        """Bytes from one tile to the next."""
        return self.format.tile_bytes(self.blocks)


_SMALLEST_NORMAL, _LARGEST = 2.0**-14, 65504.0  # of float16


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is >= n."""
    return -(-n // multiple) * multiple


def allocate(n_bytes: int) -> NDArray[np.uint8]:
    """Zeroed memory, page-aligned, in huge pages where the system has them: fewer address look-ups while streaming."""
    size = round_up(max(n_bytes, 1), mmap.PAGESIZE)
    # Private: the system gives huge pages to shared memory only if told so elsewhere.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def pack(tensor: Tensor, rows_multiple: int = TILE) -> Matrix:
    """`tensor` [N, K] in tiles, exactly; N is padded to `rows_multiple`, and K of floats to 32, with zeros."""
    if not isinstance(tensor, Quantized):
        return _pack_floats(tensor, rows_multiple)
    quantized = _padded(tensor, rows_multiple)
    scale, minimum = quantized.scale, quantized.min
    offset = next((c for c in _OFFSETS if _is_offset(c, scale, minimum)), None)
    kept = _shortened([scale] if offset is not None else [scale, minimum])
    tile_format = TileFormat(quantized.bits, quantized.group, offset, kept[0].itemsize)

    n_tiles, blocks = quantized.shape[0] // TILE, quantized.shape[1] // BLOCK
    data = allocate(n_tiles * tile_format.tile_bytes(blocks))
    tiles = data[: n_tiles * tile_format.tile_bytes(blocks)].reshape(n_tiles, -1)
    # Of a row come words of four codes, or of eight that take 4 bits, and scales, and mins; in a tile the rows' first
    # words, then their second ...: each part is turned.
    starts = (0, tile_format.scales_start(blocks), tile_format.mins_start(blocks))
    for start, values in zip(starts, (np.ascontiguousarray(quantized.packed).view(np.uint32), *kept), strict=False):
        by_row = values.reshape(n_tiles, TILE, -1)
        part = tiles[:, start : start + by_row[0].nbytes].view(values.dtype)
        part.reshape(n_tiles, -1, TILE)[:] = by_row.transpose(0, 2, 1)
    return Matrix(tile_format, data, n_tiles, blocks)


def rounded(weights: NDArray[np.float32]) -> Quantized:
    """Float weights [N, K] rounded to 8 bits, K padded to 32 with zeros; the unsigned code is 128 more than the signed.

    Per 32 weights, scale = the largest magnitude / 127, as float16 where that has it in full precision.
    """
    n, k = weights.shape
    width = round_up(k, BLOCK)
    codes = np.empty((n, width), np.uint8)
    scale = np.empty((n, width // BLOCK), np.float32)
    step = max(1, (1 << 20) // width)
    for start in range(0, n, step):
        part = np.pad(weights[start : start + step], ((0, 0), (0, width - k))).reshape(-1, width // BLOCK, BLOCK)
        exact = np.abs(part).max(axis=-1) / np.float32(127)
        with np.errstate(over="ignore", invalid="ignore"):  # not a number stays one, in the scale
            is_normal = (exact >= _SMALLEST_NORMAL) & (exact <= _LARGEST)
            rounded = np.where(is_normal, exact.astype(np.float16).astype(np.float32), exact)
            inverse = np.divide(np.float32(1), rounded, out=np.zeros_like(rounded), where=rounded > 0)
            signed = np.clip(np.rint(part * inverse[..., None]), -127, 127)
            codes[start : start + step] = (signed + 128).astype(np.uint8).reshape(-1, width)
        scale[start : start + step] = rounded
    return Quantized(codes, scale, -128 * scale, BLOCK, 8)


def _pack_floats(weights: NDArray[np.float32], rows_multiple: int) -> Matrix:
    n, k = weights.shape
    n_tiles, blocks = round_up(n, rows_multiple) // TILE, round_up(k, BLOCK) // BLOCK
    data = allocate(n_tiles * FLOATS.tile_bytes(blocks))
    tiles = data[: n_tiles * FLOATS.tile_bytes(blocks)].view(np.float32).reshape(n_tiles, blocks * BLOCK, TILE)
    for tile in range(-(-n // TILE)):
        rows = weights[tile * TILE : (tile + 1) * TILE]
        tiles[tile, :k, : len(rows)] = rows.T
    return Matrix(FLOATS, data, n_tiles, blocks)


def _is_offset(code: int, scale: NDArray[np.float32], minimum: NDArray[np.float32]) -> bool:
    """Whether every min is `code` scales below zero; the first row shows most that are not."""
    return np.array_equal(minimum[:1], -code * scale[:1]) and np.array_equal(minimum, -code * scale)


def _shortened(values: list[NDArray[np.float32]]) -> list[NDArray[np.floating]]:
    """`values` as float16 if that loses nothing of any of them."""
    with np.errstate(over="ignore"):
        halves = [v.astype(np.float16) for v in values]
    is_exact = all(np.array_equal(half.astype(np.float32), v) for half, v in zip(halves, values, strict=True))
    return list(halves if is_exact else values)


def _padded(q: Quantized, rows_multiple: int) -> Quantized:
    n, k = q.shape
    assert k % BLOCK == 0, "block formats have blocks of 32 or more"
    rows = round_up(n, rows_multiple) - n
    if not rows:
        return q
    padding = ((0, rows), (0, 0))
    return Quantized(np.pad(q.packed, padding), np.pad(q.scale, padding), np.pad(q.min, padding), q.group, q.bits)
