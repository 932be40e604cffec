"""Rotary position embedding of interleaved pairs."""

import numpy as np
from numpy.typing import NDArray

from engine.kernels.protocol import FloatArray

Rotation = tuple[FloatArray, FloatArray]
"""Cosines and sines of each row's angles, [R, 1, dim / 2] each."""


def rotation(positions: NDArray[np.int64], inverse_frequencies: NDArray[np.float64]) -> Rotation:
    """The angles of `positions` [R], rounded to float32 only as cosine and sine.

    Row by row: no element's place in a vector loop depends on how many rows there are.
    """
    cosines = np.stack([np.cos(position * inverse_frequencies) for position in positions])
    sines = np.stack([np.sin(position * inverse_frequencies) for position in positions])
    return cosines[:, None].astype(np.float32), sines[:, None].astype(np.float32)


def rotate(x: FloatArray, rotation: Rotation) -> FloatArray:
    """`x` [R, H, D] with the pairs (2i, 2i + 1) of each head turned by angle i; elements beyond `dim` stay."""
    cosines, sines = rotation
    dim = 2 * cosines.shape[-1]
    even, odd = x[..., 0:dim:2], x[..., 1:dim:2]
    turned = x.copy()
    turned[..., 0:dim:2] = even * cosines - odd * sines
    turned[..., 1:dim:2] = even * sines + odd * cosines
    return turned
