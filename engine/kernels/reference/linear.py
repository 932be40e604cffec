"""Matrix products whose every output element is summed in one order, whatever stands in the other rows.

BLAS sums in another order when the number of rows changes, at the edges of its tiles, and where its threads meet. So
every product here has one shape for good: 16 rows of activations, the outputs padded to a multiple of 48, the inputs
taken in panels of 256. With the weights on the left each kernel of OpenBLAS then keeps to whole tiles, and no panel is
deep enough to be cut again; measured for Haswell, SkylakeX and Sandybridge kernels with one to three threads.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.kernels.protocol import FloatArray
from engine.quants import Quantized, Tensor, dequantize

ROWS = 16
"""Rows of activations in one product; arrays of rows come padded to a multiple of it."""

_OUTPUTS = 48
_PANEL = 256
_ACTIVATION_BLOCK = 32
_MAX_CODE = 127


class Linear(Protocol):
    """y = W x for each row."""

    def __call__(self, x: FloatArray) -> FloatArray:
        """[R, K] -> [R, N], R a multiple of `ROWS`."""


class FloatLinear:
    """The definition: dequantized weights times float32 activations."""

    def __init__(self, tensor: Tensor) -> None:
        n_out, n_in = tensor.shape
        self._n_out = n_out
        self._weights = np.zeros((-(-n_out // _OUTPUTS) * _OUTPUTS, n_in), np.float32)
        self._weights[:n_out] = dequantize(tensor)

    def rows(self, ids: NDArray[np.int64]) -> FloatArray:
        """Rows of W, float32 [len(ids), K]: an output head that is also the embedding."""
        return self._weights[ids]

    def __call__(self, x: FloatArray) -> FloatArray:
        """[R, K] -> [R, N], R a multiple of `ROWS`."""
        out = np.empty((len(x), self._n_out), np.float32)
        for start in range(0, len(x), ROWS):
            out[start : start + ROWS] = self._product(x[start : start + ROWS]).T
        return out

    def _product(self, x: FloatArray) -> FloatArray:
        """[16, K] -> [N, 16]."""
        y = self._weights[:, :_PANEL] @ x[:, :_PANEL].T
        for start in range(_PANEL, x.shape[1], _PANEL):
            panel = slice(start, start + _PANEL)
            y += self._weights[:, panel] @ x[:, panel].T
        return y[: self._n_out]


class Int8Linear:
    """The definition for kernels with integer products: codes times int8 activations, scaled group by group, in order.

    A weight is scale * code + min, an activation is scale * code, so a group of the dot product is
    activation scale * (weight scale * sum(code * code) + min * sum(activation code)). The sums are integers below
    2 ** 24, hence exact in float32 and in any order; the groups are added in float32 in their order.
    """

    def __init__(self, tensor: Quantized) -> None:
        self._codes, self._scale, self._min, self._group = tensor.codes, tensor.scale, tensor.min, tensor.group

    def __call__(self, x: FloatArray) -> FloatArray:
        """[R, K] -> [R, N], K a multiple of 32."""
        group = self._group
        codes, scale = quantize(x)
        out = np.zeros((len(self._codes), len(x)), np.float32)
        for index in range(x.shape[1] // group):
            columns = slice(index * group, (index + 1) * group)
            activations = codes[:, columns]
            dots = self._codes[:, columns].astype(np.float32) @ activations.T
            dots *= self._scale[:, index, None]
            dots += self._min[:, index, None] * activations.sum(axis=1)
            dots *= scale[:, columns.start // _ACTIVATION_BLOCK]
            out += dots
        return np.ascontiguousarray(out.T)


def quantize(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Activations as int8 codes [R, K] (whole numbers in float32) and their scales [R, K / 32], x ~ scale * code.

    Per row and block of 32: the scale is absmax / 127, a code is x * (127 / absmax) rounded half to even.
    """
    blocks = x.reshape(len(x), x.shape[1] // _ACTIVATION_BLOCK, _ACTIVATION_BLOCK)
    peak = np.abs(blocks).max(axis=-1)
    inverse = np.divide(np.float32(_MAX_CODE), peak, out=np.zeros_like(peak), where=peak > 0)
    return np.rint(blocks * inverse[..., None]).reshape(x.shape), peak / np.float32(_MAX_CODE)
