"""A model packed for the compiled kernels, and the table of addresses they read it by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.config import ModelConfig
from engine.kernels.compiled.formats import BLOCK, Matrix, TileFormat, pack, round_up
from engine.kernels.compiled.lang import LANES
from engine.kernels.compiled.layouts import LAYER, LAYER_MATRICES, MATRIX
from engine.kernels.protocol import FloatArray, TensorSource
from engine.quants import Quantized, Tensor, dequantize

Number = TypeVar("Number", np.uint8, np.float32)

_TENSOR_NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
KernelAddresses = Callable[[TileFormat], tuple[int, int]]
"""Tile format -> addresses of its `product` and `row` kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer: its two norms' gains, padded with zeros to 32, and its matrices by `LAYER_MATRICES`."""

    attention_norm: FloatArray
    ffn_norm: FloatArray
    matrices: dict[str, Matrix]


@dataclass(frozen=True, slots=True, eq=False)
class PackedModel:
    """Everything of a model file that the forward reads; `head` is `embedding` where the file ties them."""

    config: ModelConfig
    embedding: Matrix
    head: Matrix
    output_norm: FloatArray
    layers: tuple[PackedLayer, ...]

    @classmethod
    def of(cls, config: ModelConfig, tensors: TensorSource, progress: Callable[[float], None]) -> "PackedModel":
        """The model with every matrix in tiles; `progress` is called with the fraction done, never 1."""
        progress(0.0)
        embedding = pack(tensors("token_embd.weight"))
        head = embedding if config.tied else pack(tensors("output.weight"))
        layers = []
        for layer in range(config.n_layers):
            progress((layer + 1) / (config.n_layers + 1))
            layers.append(_pack_layer(config, tensors, layer))
        return cls(config, embedding, head, _padded_gain(tensors("output_norm.weight")), tuple(layers))

    @property
    def formats(self) -> set[TileFormat]:
        """Every tile format the model has."""
        in_layers = {matrix.format for layer in self.layers for matrix in layer.matrices.values()}
        return in_layers | {self.embedding.format, self.head.format}

    def layer_table(self, kernels: KernelAddresses) -> NDArray[np.int64]:
        """One `layouts.LAYER` record a layer."""
        records = [
            LAYER.pack(
                attention_norm=address(layer.attention_norm),
                ffn_norm=address(layer.ffn_norm),
                **{
                    f"{name}_{field}": value
                    for name in LAYER_MATRICES
                    for field, value in matrix_fields(layer.matrices[name], kernels).items()
                },
            )
            for layer in self.layers
        ]
        return np.array(records, np.int64)


def matrix_fields(matrix: Matrix, kernels: KernelAddresses) -> dict[str, int]:
    """The `layouts.MATRIX` fields of `matrix`."""
    product, row = kernels(matrix.format)
    values = (address(matrix.data), product, row, matrix.tile_bytes, matrix.n_tiles, matrix.blocks)
    return dict(zip(MATRIX.names, values, strict=True))


def address(array: NDArray[np.generic]) -> int:
    """Where `array`'s memory begins."""
    return int(array.ctypes.data)


def head_width(config: ModelConfig) -> int:
    """Floats a head takes in the compiled kernels: whole vectors, the rest zeros."""
    return round_up(config.d_head, LANES)


def _pack_layer(config: ModelConfig, tensors: TensorSource, layer: int) -> PackedLayer:
    def tensor(name: str) -> Tensor:
        return tensors(f"blk.{layer}.{name}.weight")

    n_heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
    matrices = {}
    for name in LAYER_MATRICES:
        if name in n_heads:
            matrices[name] = pack(_widen_heads(tensor(_TENSOR_NAMES[name]), n_heads[name], head_width(config)))
        else:
            # Their outputs are inputs of the next product, which reads whole 32-blocks.
            matrices[name] = pack(tensor(_TENSOR_NAMES[name]), rows_multiple=BLOCK)
    return PackedLayer(_padded_gain(tensor("attn_norm")), _padded_gain(tensor("ffn_norm")), matrices)


def _padded_gain(tensor: Tensor) -> FloatArray:
    gain = dequantize(tensor)
    return np.pad(gain, (0, round_up(gain.size, BLOCK) - gain.size))


def _widen_heads(tensor: Tensor, n_heads: int, width: int) -> Tensor:
    """Rows of each head followed by zero rows up to `width`."""

    def widen(rows: NDArray[Number]) -> NDArray[Number]:
        heads = rows.reshape(n_heads, -1, rows.shape[-1])
        return np.pad(heads, ((0, 0), (0, width - heads.shape[1]), (0, 0))).reshape(n_heads * width, -1)

    if tensor.shape[0] == n_heads * width:
        return tensor
    if not isinstance(tensor, Quantized):
        return widen(tensor)
    return Quantized(widen(tensor.packed), widen(tensor.scale), widen(tensor.min), tensor.group, tensor.bits)
