"""Every GGUF block format as one internal form: unsigned codes with a scale and a min per group of weights.

A weight is `scale * code + min`. A symmetric format's offset becomes a min (`d * (q - 8) = d * q + (-8 * d)`), and a
K-quant's two-level scale is multiplied out. In float32 no product below is ever rounded (a float16 has 11 significant
bits, a sub-scale at most 7, a code at most 8 where there is no sub-scale and 6 where there is), so the form loses
nothing: `dequantize` gives bit for bit what the format's own definition gives.

Layouts after `ggml-common.h` (`block_q4_0` ...) and `ggml-quants.c` (`dequantize_row_*`) of github.com/ggml-org/ggml.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_PAIRED = 32
"""Codes of 4 bits whose halves of bytes belong together."""
_BLOCK_BYTES_AT_ONCE = 1 << 20  # bounds the temporary arrays of `unpack`, whatever the size of the tensor


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Weights w = scale * code + min, one scale and min for each `group` consecutive weights of a row.

    `packed` uint8 [..., K * bits / 8], `scale` and `min` float32 [..., K / group]; every code is below 2 ** `bits`, and
    `bits` (4 or 8) is the smallest packing that holds them. Codes of 4 bits lie as in Q4_0: of every 32, byte i of 16
    has code i in its low half and code 16 + i in its high one.
    """

    packed: Bytes
    scale: Floats
    min: Floats
    group: int
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, [..., K]."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 8 // self.bits)

    @property
    def codes(self) -> Bytes:
        """The codes one a byte, uint8 [..., K]: of 8 bits as they are stored, of 4 a copy."""
        if self.bits == 8:
            return self.packed
        return _nibbles(self.packed.reshape(-1, _PAIRED // 2)).reshape(self.shape)


Tensor = Quantized | NDArray[np.float32]

Split = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Of n blocks: packed codes uint8 [n, block_size * bits / 8], scale and min float32 [n, block_size / group].

`Any` because numpy's stubs lose the width of an array shifted by a Python int.
"""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How `block_size` consecutive weights are stored in `type_size` bytes."""

    name: str
    block_size: int
    type_size: int

    def n_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape`, whose last dimension must be a multiple of `block_size`."""
        return prod(shape) // self.block_size * self.type_size


@dataclass(frozen=True, slots=True)
class FloatFormat(BlockFormat):
    """Plain numbers: `read` takes uint8 [n, type_size] and returns float32 [n]."""

    read: Callable[[Bytes], Floats]


@dataclass(frozen=True, slots=True)
class QuantFormat(BlockFormat):
    """Blocks of codes: `split` takes uint8 [n, type_size] apart."""

    group: int
    bits: int
    split: Callable[[Bytes], Split]


def unpack(type_id: int, raw: Bytes, shape: tuple[int, ...]) -> Tensor:
    """The tensor stored in `raw`: float32 [shape] for F32, F16 and BF16, else `Quantized`; a copy in either case.

    `raw` is the tensor's bytes, flat, as `GGUFFile.data` gives them. Raises `ValueError` for a type that is not in
    `BLOCK_FORMATS` and for a shape that does not fit `raw`.
    """
    block_format = BLOCK_FORMATS.get(type_id)
    if block_format is None:
        raise ValueError(f"tensor type {type_id} is not one of {sorted(BLOCK_FORMATS)}")
    if not shape or shape[-1] % block_format.block_size or block_format.n_bytes(shape) != raw.size:
        raise ValueError(f"{raw.size} bytes of {block_format.name} do not make a tensor of shape {shape}")
    blocks = raw.reshape(-1, block_format.type_size)
    step = max(1, _BLOCK_BYTES_AT_ONCE // block_format.type_size)
    parts = [slice(start, start + step) for start in range(0, len(blocks), step)]

    if isinstance(block_format, FloatFormat):
        values = np.empty(len(blocks), np.float32)
        for part in parts:
            values[part] = block_format.read(blocks[part])
        return values.reshape(shape)

    assert isinstance(block_format, QuantFormat)
    groups = block_format.block_size // block_format.group
    packed = np.empty((len(blocks), block_format.block_size * block_format.bits // 8), np.uint8)
    scale = np.empty((len(blocks), groups), np.float32)
    minimum = np.empty((len(blocks), groups), np.float32)
    for part in parts:
        codes, scale[part], minimum[part] = block_format.split(blocks[part])
        # Block by block as one item each: numpy is slow at rows of a few bytes.
        packed[part].view(f"V{packed.shape[1]}")[:] = codes.view(f"V{packed.shape[1]}")
    per_row = (*shape[:-1], shape[-1] // block_format.group)
    return Quantized(
        packed.reshape(*shape[:-1], shape[-1] * block_format.bits // 8),
        scale.reshape(per_row),
        minimum.reshape(per_row),
        block_format.group,
        block_format.bits,
    )


def paired(codes: NDArray[Any]) -> NDArray[Any]:
    """Codes of 4 bits, uint8 [..., K] with K a multiple of 32, as `Quantized.packed` has them: [..., K / 2]."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, _PAIRED // 2)
    pairs: NDArray[Any] = halves[..., 0, :] | halves[..., 1, :] << 4
    return pairs.reshape(*codes.shape[:-1], -1)


def dequantize(tensor: Tensor) -> Floats:
    """The weights as float32, in the tensor's own shape; a float32 tensor is returned as it is."""
    if not isinstance(tensor, Quantized):
        return tensor
    grouped = tensor.codes.reshape(*tensor.scale.shape, tensor.group).astype(np.float32)
    grouped *= tensor.scale[..., None]
    grouped += tensor.min[..., None]
    return grouped.reshape(tensor.shape)


def _f16(blocks: Bytes, offset: int) -> Floats:
    """The float16 at byte `offset` of each block, as float32 [n, 1]."""
    return blocks[:, offset : offset + 2].view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """All low nibbles of the last axis, then all high ones: uint8 [..., b] -> [..., 2 * b]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _crumbs(packed: Bytes) -> Bytes:
    """Bits 0-1 of every byte of the last axis, then bits 2-3, 4-5, 6-7: uint8 [..., b] -> [..., 4 * b]."""
    return np.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """Bit 0 of every byte of the last axis, then bit 1, ... bit 7: uint8 [..., b] -> [..., 8 * b]."""
    return np.concatenate([(packed >> shift) & 1 for shift in range(8)], axis=-1)


def _read_f32(blocks: Bytes) -> Floats:
    return blocks.copy().view("<f4")[:, 0].astype(np.float32, copy=False)


def _read_f16(blocks: Bytes) -> Floats:
    return _f16(blocks, 0)[:, 0]


def _read_bf16(blocks: Bytes) -> Floats:
    """BF16 is the upper half of a float32."""
    return (blocks.copy().view("<u2")[:, 0].astype(np.uint32) << 16).view(np.float32)


def _split_q4_0(blocks: Bytes) -> Split:
    """Layout: d f16 | 16 bytes, weight i in the low nibble of byte i and 16 + i in the high one. w = d * (q - 8)."""
    d = _f16(blocks, 0)
    return blocks[:, 2:], d, -8 * d


def _split_q4_1(blocks: Bytes) -> Split:
    """Layout: d f16 | m f16 | nibbles as in Q4_0. w = d * q + m."""
    return blocks[:, 4:], _f16(blocks, 0), _f16(blocks, 2)


def _fifth_bits(packed: Bytes) -> NDArray[Any]:
    """Bit 4 of the 32 codes of a Q5_0 or Q5_1 block, in place, from a little-endian 32-bit mask: [n, 4] -> [n, 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _split_q5_0(blocks: Bytes) -> Split:
    """Layout: d f16 | 32-bit mask of the fifth bits | nibbles as in Q4_0. w = d * (q - 16)."""
    d = _f16(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), d, -16 * d


def _split_q5_1(blocks: Bytes) -> Split:
    """Layout: d f16 | m f16 | 32-bit mask of the fifth bits | nibbles as in Q4_0. w = d * q + m."""
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _f16(blocks, 0), _f16(blocks, 2)


def _split_q8_0(blocks: Bytes) -> Split:
    """Layout: d f16 | 32 int8. w = d * q, so the unsigned code is q + 128, which flips the sign bit."""
    d = _f16(blocks, 0)
    return blocks[:, 2:] ^ 128, d, -128 * d


def _split_q2_k(blocks: Bytes) -> Split:
    """Layout: 16 bytes (sub-scale low, sub-min high nibble) | 64 bytes of codes | d f16 | dmin f16, in groups of 16.

    Each half of 128 weights has 32 bytes: bits 0-1 hold its first 32 weights, bits 2-3 the next ...
    """
    sub = blocks[:, :16]
    codes = _crumbs(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 256)
    return paired(codes), _f16(blocks, 80) * (sub & 15), -_f16(blocks, 82) * (sub >> 4)


def _split_q3_k(blocks: Bytes) -> Split:
    """Layout: 32 bytes of third bits | 64 bytes of low bits as in Q2_K | 12 bytes of sub-scales | d f16.

    Groups of 16, w = d * (sub - 32) * (q - 4). Bit b of third-bit byte i belongs to weight 32 * b + i. The 6-bit
    sub-scales have their low 4 bits in 8 bytes of nibbles and their upper 2 in 4 more bytes.
    """
    codes = _crumbs(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 256) | _bits(blocks[:, :32]) << 2
    sub = _nibbles(blocks[:, 96:104]) | _crumbs(blocks[:, 104:108]) << 4
    scale = _f16(blocks, 108) * (sub.astype(np.float32) - 32)
    return paired(codes), scale, -4 * scale


def _k_scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight 6-bit sub-scales and sub-mins of a Q4_K or Q5_K block: uint8 [n, 12] -> two of [n, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 mins 0-3 in their low six bits; their two upper bits belong to scales and
    mins 4-7, whose low four bits are the nibbles of bytes 8-11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    mins = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return scales, mins


def _split_q4_k(blocks: Bytes) -> Split:
    """Layout: d f16 | dmin f16 | 12 bytes of sub-scales and sub-mins | 128 bytes of codes, in groups of 32.

    Each 64 weights have 32 bytes, low nibbles first.
    """
    scales, mins = _k_scales_and_mins(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return paired(codes), _f16(blocks, 0) * scales, -_f16(blocks, 2) * mins


def _split_q5_k(blocks: Bytes) -> Split:
    """As Q4_K, with 32 bytes of fifth bits before the codes: bit b of byte i belongs to weight 32 * b + i."""
    scales, mins = _k_scales_and_mins(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | _bits(blocks[:, 16:48]) << 4
    return codes, _f16(blocks, 0) * scales, -_f16(blocks, 2) * mins


def _split_q6_k(blocks: Bytes) -> Split:
    """Layout: 128 bytes of low nibbles | 64 bytes of upper two bits | 16 int8 sub-scales | d f16, in groups of 16.

    Each half of 128 weights has 64 and 32 of those bytes. w = d * sub * (q - 32).
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    codes = (low | _crumbs(blocks[:, 128:192].reshape(-1, 2, 32)) << 4).reshape(-1, 256)
    scale = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return codes, scale, -32 * scale


BLOCK_FORMATS: Mapping[int, BlockFormat] = {
    0: FloatFormat("F32", 1, 4, _read_f32),
    1: FloatFormat("F16", 1, 2, _read_f16),
    2: QuantFormat("Q4_0", 32, 18, 32, 4, _split_q4_0),
    3: QuantFormat("Q4_1", 32, 20, 32, 4, _split_q4_1),
    6: QuantFormat("Q5_0", 32, 22, 32, 8, _split_q5_0),
    7: QuantFormat("Q5_1", 32, 24, 32, 8, _split_q5_1),
    8: QuantFormat("Q8_0", 32, 34, 32, 8, _split_q8_0),
    10: QuantFormat("Q2_K", 256, 84, 16, 4, _split_q2_k),
    11: QuantFormat("Q3_K", 256, 110, 16, 4, _split_q3_k),
    12: QuantFormat("Q4_K", 256, 144, 32, 4, _split_q4_k),
    13: QuantFormat("Q5_K", 256, 176, 32, 8, _split_q5_k),
    14: QuantFormat("Q6_K", 256, 210, 16, 8, _split_q6_k),
    30: FloatFormat("BF16", 1, 2, _read_bf16),
}
"""The tensor types Lockstep reads, by their number in the file (`enum ggml_type`)."""
