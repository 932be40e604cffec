"""A llama forward in float64, written for being obviously right: no cache, no batch, loops over heads and positions."""

from pathlib import Path

import gguf
import numpy as np

from engine.gguf import GGUFFile
from tests.random_blocks import oracle

MATRICES_AND_NORMS = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)


class LlamaOracle:
    """`frequencies` are the rotary ones, in radians per position; by default those of plain RoPE."""

    def __init__(self, path: Path, frequencies: np.ndarray | None = None) -> None:
        with GGUFFile.open(path) as file:
            self.tensors = {
                name: oracle(gguf.GGMLQuantizationType(t.type_id).name, file.data(name), t.shape).astype(np.float64)
                for name, t in file.tensors.items()
            }
            keys = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
        self.n_layers = keys["block_count"]
        self.n_heads, self.n_kv_heads = keys["attention.head_count"], keys["attention.head_count_kv"]
        self.eps = keys["attention.layer_norm_rms_epsilon"]
        self.d_head = self.tensors["blk.0.attn_q.weight"].shape[0] // self.n_heads
        dim = keys["rope.dimension_count"]
        if frequencies is None:
            frequencies = np.array([keys["rope.freq_base"] ** (-2 * i / dim) for i in range(dim // 2)])
        self.frequencies = frequencies

    def logits(self, ids: list[int]) -> np.ndarray:
        """Of every position, [T, V]."""
        x = self.tensors["token_embd.weight"][list(ids)]
        for layer in range(self.n_layers):
            weights = {name: self.tensors[f"blk.{layer}.{name}.weight"] for name in MATRICES_AND_NORMS}
            x = x + self.attention(self.norm(x, weights["attn_norm"]), weights) @ weights["attn_output"].T
            h = self.norm(x, weights["ffn_norm"])
            gate = h @ weights["ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ weights["ffn_up"].T)) @ weights["ffn_down"].T
        x = self.norm(x, self.tensors["output_norm.weight"])
        return x @ self.tensors.get("output.weight", self.tensors["token_embd.weight"]).T

    def norm(self, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * gain

    def attention(self, x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
        T = len(x)
        out = np.empty((T, self.n_heads, self.d_head))
        for head in range(self.n_heads):
            kv_head = head // (self.n_heads // self.n_kv_heads)
            q = self.rotate(x @ self.head_of(weights["attn_q"], head).T)
            k = self.rotate(x @ self.head_of(weights["attn_k"], kv_head).T)
            v = x @ self.head_of(weights["attn_v"], kv_head).T
            for t in range(T):
                scores = k[: t + 1] @ q[t] / np.sqrt(self.d_head)
                shares = np.exp(scores - scores.max())
                out[t, head] = shares @ v[: t + 1] / shares.sum()
        return out.reshape(T, -1)

    def head_of(self, matrix: np.ndarray, head: int) -> np.ndarray:
        return matrix[head * self.d_head : (head + 1) * self.d_head]

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """The pairs (2i, 2i + 1) as complex numbers, turned."""
        turned = x.copy()
        for position in range(len(x)):
            for i, frequency in enumerate(self.frequencies):
                pair = complex(x[position, 2 * i], x[position, 2 * i + 1]) * np.exp(1j * position * frequency)
                turned[position, 2 * i : 2 * i + 2] = pair.real, pair.imag
        return turned
