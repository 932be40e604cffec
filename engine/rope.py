"""The frequencies of the rotary position embedding, with every scaling a `llama` file can ask for."""

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How positions turn the first `dim` elements of each head.

    GGUF files of architecture `llama` have their query and key rows permuted so that elements 2i and 2i + 1 are the
    pair turned by frequency i. `divisors` (the file's `rope_freqs.weight`) divide the frequencies one by one.
    """

    base: float
    dim: int
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0
    divisors: tuple[float, ...] | None = None

    def inverse_frequencies(self) -> NDArray[np.float64]:
        """Radians per position of each pair, float64 [dim / 2].

        Without scaling base^(-2i/dim) (Su et al. 2021, RoFormer, section 3.2.2); `linear` divides by `factor` (Chen
        et al. 2023, position interpolation); `llama3` after Meta's `apply_scaling` in llama-models, `model.py`.
        """
        frequencies = self.base ** (-2.0 * np.arange(self.dim // 2) / self.dim)
        if self.divisors is not None:
            frequencies /= np.array(self.divisors, np.float64)
        if self.scaling == "linear":
            frequencies /= self.factor
        elif self.scaling == "llama3":
            # Waves that turn often within the original context stay, slow ones are stretched, with a ramp between.
            turns = self.original_context * frequencies / (2 * math.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = np.clip(kept, 0.0, 1.0)
            frequencies *= kept + (1 - kept) / self.factor
        return frequencies
