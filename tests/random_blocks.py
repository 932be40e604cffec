"""Random blocks of every GGUF type, for tests of the formats and for models of them."""

from math import prod

import gguf
import numpy as np

# Where the float16 scales of a block lie, and how large one must be (against the first) for weights around zero.
SCALES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 1},
    "Q4_1": {0: 1, 2: -7.5},
    "Q5_0": {0: 1},
    "Q5_1": {0: 1, 2: -15.5},
    "Q8_0": {0: 1},
    "Q2_K": {80: 1, 82: 1.5},
    "Q3_K": {108: 1},
    "Q4_K": {0: 1, 2: 7.5},
    "Q5_K": {0: 1, 2: 15.5},
    "Q6_K": {208: 1},
}
QUANTIZED = tuple(SCALES)


def type_id(name: str) -> int:
    return int(gguf.GGMLQuantizationType[name])


def block_sizes(name: str) -> tuple[int, int]:
    """Weights and bytes of one block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def oracle(name: str, raw: bytes | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What the `gguf` package makes of `raw`, float32 [shape]."""
    block_size, type_size = block_sizes(name)
    rows = np.frombuffer(raw, np.uint8).reshape(*shape[:-1], shape[-1] // block_size * type_size)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name]).reshape(shape)


def random_blocks(name: str, n_blocks: int, rng: np.random.Generator, scales: np.ndarray | None = None) -> np.ndarray:
    """uint8 [n_blocks, type_size]: random in every bit but the float16 scales.

    These are near 0.01 and give weights around zero, or are drawn from `scales`, as they are.
    """
    _, type_size = block_sizes(name)
    blocks = rng.integers(0, 256, (n_blocks, type_size), np.uint8)
    first = rng.uniform(0.005, 0.01, n_blocks)
    for offset, ratio in SCALES[name].items():
        values = first * ratio if scales is None else rng.choice(scales, n_blocks)
        blocks[:, offset : offset + 2] = values.astype("<f2")[:, None].view(np.uint8)
    return blocks


def encode(name: str, weights: np.ndarray, rng: np.random.Generator) -> bytes:
    """`weights` in type `name`; for K-quants, which `gguf` cannot write, random blocks of the same spread instead."""
    quant_type = gguf.GGMLQuantizationType[name]
    if not name.endswith("_K"):
        return gguf.quants.quantize(weights, quant_type).tobytes()
    block_size, _ = block_sizes(name)
    n_blocks = prod(weights.shape) // block_size
    probe = oracle(name, random_blocks(name, 256, np.random.default_rng(0)), (256, block_size))
    blocks = random_blocks(name, n_blocks, rng)
    for offset in SCALES[name]:
        scale = blocks[:, offset : offset + 2].copy().view("<f2")
        blocks[:, offset : offset + 2] = (scale * (weights.std() / probe.std())).astype("<f2").view(np.uint8)
    return blocks.tobytes()
