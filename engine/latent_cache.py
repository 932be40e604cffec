"""The cache of multi-head latent attention."""

from typing import Any

from numpy.typing import NDArray

from engine.sequence_cache import SequenceCache, Stored


class LatentCache(SequenceCache):
    """Per layer and position one latent of width `d_latent` and one rotary key of width `d_rope`, shared by all heads.

    Keys and values are projected up from the latent when they are used (DeepSeek-V2, arXiv 2405.04434, section
    2.1.2). The same rules as `KVCache`. Raises `CacheError` for a size below 1 or a dtype other than float32 and
    float16.
    """

    def __init__(  # noqa: PLR0917 - the order of the array's dimensions is worth knowing by heart
        self, n_layers: int, d_latent: int, d_rope: int, max_len: int, batch: int = 1, dtype: str = "float32"
    ) -> None:
        super().__init__(n_layers, batch, max_len, dtype, ((d_latent,), (d_rope,)))

    def update(self, layer: int, latent: NDArray[Any], k_rope: NDArray[Any]) -> tuple[Stored, Stored]:
        """Append [B, T, d_latent] and [B, T, d_rope]; returns all stored of `layer`, [B, s + T, ...] each.

        They are read-only views in the cache's dtype, the new rows included. Raises `CacheError`, having changed
        nothing, for another shape, an overflow, or rows filled to different lengths.
        """
        return self._extend(layer, (latent, k_rope))
