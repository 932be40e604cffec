"""The reference kernels: numpy, slow, and the definition of what the others must compute."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Self

import numpy as np
from threadpoolctl import ThreadpoolController

from engine.batch import Chunk
from engine.config import ModelConfig
from engine.kernels.protocol import FloatArray, TensorSource
from engine.kernels.reference.forward import forward
from engine.kernels.reference.linear import ROWS, FloatLinear
from engine.kernels.reference.weights import Activations, Weights, pack
from engine.kv_cache import KVCache

_BLAS = ThreadpoolController().select(user_api="blas")


class ReferenceKernels:
    """A `KernelSet`. With `activations` of "int8" it is the tight definition of kernels with integer products."""

    rounds_floats = False

    def __init__(self, activations: Activations = "float32") -> None:
        self.name = "reference" if activations == "float32" else "reference-int8"
        self.cpu_path = f"numpy {np.__version__} {_arithmetic_digest()}"
        self._activations = activations

    def with_threads(self, threads: int) -> Self:  # noqa: ARG002 - its products run on one thread, whatever is asked
        """This set."""
        return self

    def pack(self, config: ModelConfig, tensors: TensorSource, progress: Callable[[float], None]) -> Weights:
        """The model's weights, in float32 except where products are taken of codes."""
        return pack(config, tensors, self._activations, progress)

    def new_cache(self, config: ModelConfig, n_slots: int, max_len: int, dtype: str) -> KVCache:
        """An empty cache; raises `CacheError` for a size below 1 or an unknown dtype."""
        return KVCache(config.n_layers, config.n_kv_heads, config.d_head, max_len, batch=n_slots, dtype=dtype)

    def forward(self, weights: Weights, chunks: Sequence[Chunk], cache: KVCache) -> FloatArray:
        """As `KernelSet.forward`.

        With one thread: those of OpenBLAS wait for each other by spinning, and as soon as anything else wants a core,
        the server's own event loop included, a step takes ten times as long.
        """
        with _BLAS.limit(limits=1):
            return forward(weights, chunks, cache)


def _arithmetic_digest() -> str:
    """A hash of what this machine's BLAS and vector loops make of fixed numbers: they choose their code by the CPU."""
    numbers = np.linspace(-14, 14, 96 * 600, dtype=np.float32).reshape(96, 600)
    products = FloatLinear(numbers)(numbers[:ROWS])
    return blake2b(products.tobytes() + np.exp(numbers).tobytes(), digest_size=8).hexdigest()
