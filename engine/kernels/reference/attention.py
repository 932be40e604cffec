"""Attention of one row over its own slot, in absolute partitions of positions."""

import numpy as np

from engine.kernels.protocol import FloatArray

PARTITION = 256


def attend(query: FloatArray, keys: FloatArray, values: FloatArray) -> FloatArray:
    """softmax(query . keys) values for one row at position p, float32 [Hkv, G, D].

    `query` [Hkv, G, D] is already divided by sqrt(D); the G queries of a group share their K/V head, `keys` and
    `values` [Hkv, p + 1, D]. Positions 0..255, 256..511, ... are reduced each by itself and merged in that order
    (the running softmax of Milakov & Gimelshein, arXiv 1805.02867), so every shape depends on p alone.
    """
    peak, total, mixed = _partition(query, keys[:, :PARTITION], values[:, :PARTITION])
    for start in range(PARTITION, keys.shape[1], PARTITION):
        part = slice(start, start + PARTITION)
        next_peak, next_total, next_mixed = _partition(query, keys[:, part], values[:, part])
        new_peak = np.maximum(peak, next_peak)
        old_share, new_share = np.exp(peak - new_peak), np.exp(next_peak - new_peak)
        total = total * old_share + next_total * new_share
        mixed = mixed * old_share + next_mixed * new_share
        peak = new_peak
    return mixed / total


def _partition(query: FloatArray, keys: FloatArray, values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The largest score [Hkv, G, 1], the sum of exp(score - largest) [Hkv, G, 1], and the values mixed by those."""
    scores = query @ keys.transpose(0, 2, 1)
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    return peak, weights.sum(axis=-1, keepdims=True), weights @ values
