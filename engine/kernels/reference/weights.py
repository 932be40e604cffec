"""A model's weights as the reference kernels want them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.config import ModelConfig
from engine.kernels.protocol import FloatArray, TensorSource
from engine.kernels.reference.linear import FloatLinear, Int8Linear, Linear
from engine.quants import Quantized, Tensor, dequantize

Activations = Literal["float32", "int8"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block."""

    attn_norm: FloatArray
    q: Linear
    k: Linear
    v: Linear
    attn_output: Linear
    ffn_norm: FloatArray
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. `embed` maps token ids [R] to rows [R, d_model]."""

    config: ModelConfig
    inverse_frequencies: NDArray[np.float64]
    embed: Callable[[NDArray[np.int64]], FloatArray]
    layers: tuple[Layer, ...]
    output_norm: FloatArray
    head: Linear


def pack(
    config: ModelConfig, tensors: TensorSource, activations: Activations, progress: Callable[[float], None]
) -> Weights:
    """The weights in `tensors`; `progress` is called with the fraction done."""

    def linear(name: str) -> Linear:
        return _linear(tensors(f"{name}.weight"), activations)

    def vector(name: str) -> FloatArray:
        return dequantize(tensors(f"{name}.weight"))

    def layer(index: int) -> Layer:
        progress(index / (config.n_layers + 1))
        block = f"blk.{index}"
        return Layer(
            attn_norm=vector(f"{block}.attn_norm"),
            q=linear(f"{block}.attn_q"),
            k=linear(f"{block}.attn_k"),
            v=linear(f"{block}.attn_v"),
            attn_output=linear(f"{block}.attn_output"),
            ffn_norm=vector(f"{block}.ffn_norm"),
            gate=linear(f"{block}.ffn_gate"),
            up=linear(f"{block}.ffn_up"),
            down=linear(f"{block}.ffn_down"),
        )

    layers = tuple(layer(index) for index in range(config.n_layers))
    progress(config.n_layers / (config.n_layers + 1))
    embedding = tensors("token_embd.weight")
    head = _linear(embedding if config.tied else tensors("output.weight"), activations)
    weights = Weights(
        config=config,
        inverse_frequencies=config.rope.inverse_frequencies(),
        embed=head.rows if config.tied and isinstance(head, FloatLinear) else partial(_rows, embedding),
        layers=layers,
        output_norm=vector("output_norm"),
        head=head,
    )
    progress(1.0)
    return weights


def _linear(tensor: Tensor, activations: Activations) -> Linear:
    if activations == "int8" and isinstance(tensor, Quantized):
        return Int8Linear(tensor)
    return FloatLinear(tensor)


def _rows(tensor: Tensor, ids: NDArray[np.int64]) -> FloatArray:
    """Rows `ids` of a matrix as float32; no other row is dequantized."""
    if not isinstance(tensor, Quantized):
        return tensor[ids]
    return dequantize(Quantized(tensor.packed[ids], tensor.scale[ids], tensor.min[ids], tensor.group, tensor.bits))
