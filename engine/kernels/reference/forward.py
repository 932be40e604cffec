"""One step of a llama decoder over a ragged batch, as plainly as numpy can say it.

Rows are padded with zeros to a multiple of 16 once; all arithmetic outside attention then works on whole blocks, and
the vector loops of numpy never meet a tail. Zero rows stay zero through every layer.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.batch import Chunk
from engine.config import ModelConfig
from engine.kernels.protocol import FloatArray, Rows, begin
from engine.kernels.reference.attention import attend
from engine.kernels.reference.linear import ROWS
from engine.kernels.reference.rope import Rotation, rotate, rotation
from engine.kernels.reference.weights import Layer, Weights
from engine.kv_cache import KVCache

Number = TypeVar("Number", np.float32, np.int64)


def forward(weights: Weights, chunks: Sequence[Chunk], cache: KVCache) -> FloatArray:
    """Append `chunks` to their slots; float32 logits [rows that want them, V], in row order.

    Raises `CacheError`, having changed nothing, for chunks that do not fit `cache`.
    """
    begin(chunks, cache)
    rows = Rows.of(chunks)
    n_rows, config = len(rows.token_ids), weights.config
    x = _padded(weights.embed(rows.token_ids))
    turn = rotation(_padded(rows.positions), weights.inverse_frequencies)
    # SwiGLU's exp(-x) overflows to the right limit. Whatever else is not finite stays in its own row, for the sampler
    # to refuse.
    with np.errstate(over="ignore", invalid="ignore"):
        for index, layer in enumerate(weights.layers):
            q, k, v = _project(layer, config, _rms_norm(x, layer.attn_norm, config.norm_eps), turn)
            cache.append(index, rows.slots, rows.positions, k[:n_rows], v[:n_rows])
            x += layer.attn_output(_attention(q, chunks, cache, index))
            x += _swiglu(layer, _rms_norm(x, layer.ffn_norm, config.norm_eps))
        wanted = _padded(x[:n_rows][rows.wants_logits])
        logits = weights.head(_rms_norm(wanted, weights.output_norm, config.norm_eps))
    return logits[: np.count_nonzero(rows.wants_logits)]


def _padded(rows: NDArray[Number]) -> NDArray[Number]:
    """`rows` [R, ...] followed by zeros, up to the next multiple of `ROWS`."""
    padded = np.zeros((-(-len(rows) // ROWS) * ROWS, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


def _rms_norm(x: FloatArray, gain: FloatArray, eps: float) -> FloatArray:
    """Each row divided by its root mean square, times `gain` (Zhang & Sennrich, arXiv 1910.07467)."""
    mean_square: FloatArray = np.square(x).mean(axis=-1, keepdims=True)
    normed: FloatArray = x / np.sqrt(mean_square + np.float32(eps)) * gain
    return normed


def _project(
    layer: Layer, config: ModelConfig, x: FloatArray, turn: Rotation
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Queries [R, Hkv, G, D], divided by sqrt(D), and keys and values [R, Hkv, D]; queries and keys are turned."""
    kv_shape = (len(x), config.n_kv_heads, config.d_head)
    q = rotate(layer.q(x).reshape(len(x), config.n_heads, config.d_head), turn) / np.float32(math.sqrt(config.d_head))
    k = rotate(layer.k(x).reshape(kv_shape), turn)
    v = layer.v(x).reshape(kv_shape)
    return q.reshape(len(x), config.n_kv_heads, -1, config.d_head), k, v


def _attention(queries: FloatArray, chunks: Sequence[Chunk], cache: KVCache, layer: int) -> FloatArray:
    """What each row's queries [R, Hkv, G, D] gather from positions 0..p of their own slot, [R, Hq * D]."""
    mixed = np.zeros_like(queries)
    row = 0
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        keys, values = cache.read(layer, chunk.slot, end)
        for seen in range(chunk.start + 1, end + 1):
            mixed[row] = attend(queries[row], keys[:, :seen], values[:, :seen])
            row += 1
    return mixed.reshape(len(queries), -1)


def _swiglu(layer: Layer, x: FloatArray) -> FloatArray:
    """The feed-forward part: down(silu(gate x) * up x) (Shazeer, arXiv 2002.05202)."""
    gate = layer.gate(x)
    return layer.down(gate / (1 + np.exp(-gate)) * layer.up(x))
