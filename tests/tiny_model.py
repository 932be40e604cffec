"""Small random models of architecture `llama`, as whole GGUF files with a vocabulary and a chat template."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.gguf import GGUFFile
from tests.gguf_writer import RawTensor, write_gguf
from tests.random_blocks import block_sizes, encode, oracle, type_id

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 (bos) and 2 (eos), as in SmolLM2
MERGES = ("Ġ t", "h e", "i n", "Ġt he")


def byte_alphabet() -> list[str]:
    """The printable stand-ins of the 256 bytes in GPT-2's byte-level BPE, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(unprintable)) for byte in range(256)]


def vocabulary() -> dict[str, Any]:
    """The tokenizer's metadata: three control tokens, 256 bytes, and the results of a few merges."""
    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    types = np.ones(len(tokens), np.int32)
    types[: len(SPECIAL_TOKENS)] = 3
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def write_tiny_llama(
    path: Path,
    *,
    n_layers: int = 2,
    d_model: int | None = None,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    d_head: int | None = None,
    d_ff: int | None = None,
    quant: str = "F32",
    tied: bool = True,
    max_context: int = 256,
    seed: int = 0,
    chat_template: str | None = CHATML,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """A valid model at `path`, its matrices of type `quant`; the same arguments give the same bytes.

    Widths left out are the smallest that suit the type's blocks: 64 and 96, or 256 and 512 for K-quants. `metadata`
    and `tensors` are added to the file's own, replace them, or take them away where the value is None.
    """
    is_k_quant = block_sizes(quant)[0] == 256
    d_model = d_model or (256 if is_k_quant else 64)
    d_ff = d_ff or (512 if is_k_quant else 96)
    width = d_head or d_model // n_heads
    keys = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": n_layers,
        "llama.context_length": max_context,
        "llama.embedding_length": d_model,
        "llama.feed_forward_length": d_ff,
        "llama.attention.head_count": n_heads,
        "llama.attention.head_count_kv": n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width,
        "llama.rope.freq_base": 10000.0,
        **vocabulary(),
    }
    if d_head is not None:
        keys |= {"llama.attention.key_length": d_head, "llama.attention.value_length": d_head}
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template

    rng = np.random.default_rng(seed)

    def matrix(n_out: int, n_in: int) -> RawTensor:
        weights = rng.normal(0, n_in**-0.5, (n_out, n_in)).astype(np.float32)
        return RawTensor(type_id(quant), (n_out, n_in), encode(quant, weights, rng))

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, d_model).astype(np.float32)

    vocab_size = len(keys["tokenizer.ggml.tokens"])
    weights: dict[str, Any] = {"token_embd.weight": matrix(vocab_size, d_model), "output_norm.weight": norm()}
    if not tied:
        weights["output.weight"] = matrix(vocab_size, d_model)
    for layer in range(n_layers):
        weights |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(n_heads * width, d_model),
            f"blk.{layer}.attn_k.weight": matrix(n_kv_heads * width, d_model),
            f"blk.{layer}.attn_v.weight": matrix(n_kv_heads * width, d_model),
            f"blk.{layer}.attn_output.weight": matrix(d_model, n_heads * width),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(d_ff, d_model),
            f"blk.{layer}.ffn_up.weight": matrix(d_ff, d_model),
            f"blk.{layer}.ffn_down.weight": matrix(d_model, d_ff),
        }
    return write_gguf(
        path,
        {key: value for key, value in (keys | (metadata or {})).items() if value is not None},
        {name: value for name, value in (weights | (tensors or {})).items() if value is not None},
    )


def write_as_float32(source: Path, target: Path) -> Path:
    """The model at `source` with every tensor dequantized by the `gguf` package, at `target`."""
    with GGUFFile.open(source) as file:
        tensors = {
            name: oracle(gguf.GGMLQuantizationType(info.type_id).name, file.data(name), info.shape)
            for name, info in file.tensors.items()
        }
        return write_gguf(target, file.metadata, tensors)
