"""What a model file says about its architecture, checked: nothing the kernels would have to ignore gets past here.

Keys after `docs/gguf.md` of github.com/ggml-org/ggml. A metadata key or a tensor that changes what the model computes
and that Lockstep does not compute is refused by name: an answer from half a model looks like an answer.
"""

import math
import reprlib
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.gguf import GGUFFile
from engine.quants import dequantize, unpack
from engine.rope import RopeConfig

_HARMLESS_VALUES = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
"""Keys that would change the computation, and the values with which they do not (0 is llama.cpp's "unset")."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The hyperparameters of a model of architecture `llama`.

    `n_heads` query heads share `n_kv_heads` key/value heads, all `d_head` wide; `d_ff` is the width of the SwiGLU;
    `max_context` is the most positions the model was made for; `tied` says that the output head is the embedding.
    """

    architecture: str
    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    tied: bool

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "ModelConfig":
        """The configuration in `file`, whose tensors are exactly those it implies.

        Raises `ModelFileError` naming the key that is missing, out of range or not supported, or the tensor that is
        missing, has another shape than the configuration implies, or is not part of the architecture.
        """
        architecture = file.require("general.architecture", str)
        if architecture != "llama":
            raise ModelFileError(
                file.path,
                f"architecture {reprlib.repr(architecture)} is not supported; supported is 'llama'",
                "general.architecture",
            )
        for key, harmless in _HARMLESS_VALUES.items():
            value = file.metadata.get(f"llama.{key}", harmless[0])
            if not isinstance(value, (bool, int, float)) or value not in harmless:
                raise ModelFileError(
                    file.path, f"{reprlib.repr(value)} is not supported, only {harmless[0]!r}", f"llama.{key}"
                )

        d_model = _positive_int(file, "llama.embedding_length")
        n_heads = _positive_int(file, "llama.attention.head_count")
        n_kv_heads = _positive_int(file, "llama.attention.head_count_kv", n_heads)
        if n_heads % n_kv_heads:
            raise ModelFileError(
                file.path, f"{n_kv_heads} does not divide the {n_heads} query heads", "llama.attention.head_count_kv"
            )
        if "llama.attention.key_length" not in file.metadata and d_model % n_heads:
            raise ModelFileError(
                file.path, f"{n_heads} does not divide the embedding length {d_model}", "llama.attention.head_count"
            )
        d_head = _positive_int(file, "llama.attention.key_length", d_model // n_heads)
        if _positive_int(file, "llama.attention.value_length", d_head) != d_head:
            raise ModelFileError(
                file.path,
                f"must be the key length {d_head}, other widths are not supported",
                "llama.attention.value_length",
            )
        context = _positive_int(file, "llama.context_length")
        has_window = file.get("llama.attention.sliding_window", int, 0) != 0
        config = cls(
            architecture=architecture,
            name=file.get("general.name", str, file.path.stem),
            n_layers=_positive_int(file, "llama.block_count"),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            d_ff=_positive_int(file, "llama.feed_forward_length"),
            vocab_size=len(file.require("tokenizer.ggml.tokens", list)),
            # Up to the length of its window, sliding-window attention is full attention.
            max_context=min(context, _positive_int(file, "llama.attention.sliding_window")) if has_window else context,
            norm_eps=_positive_float(file, "llama.attention.layer_norm_rms_epsilon"),
            rope=_rope(file, d_head),
            tied="output.weight" not in file.tensors,
        )
        _check_tensors(file, config)
        return config

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of such a model, one by one; matrices are [outputs, inputs]."""
        d, q, kv = self.d_model, self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        yield "token_embd.weight", (self.vocab_size, d)
        yield "output_norm.weight", (d,)
        if not self.tied:
            yield "output.weight", (self.vocab_size, d)
        if self.rope.divisors is not None:
            yield "rope_freqs.weight", (self.rope.dim // 2,)
        for layer in range(self.n_layers):
            yield f"blk.{layer}.attn_norm.weight", (d,)
            yield f"blk.{layer}.attn_q.weight", (q, d)
            yield f"blk.{layer}.attn_k.weight", (kv, d)
            yield f"blk.{layer}.attn_v.weight", (kv, d)
            yield f"blk.{layer}.attn_output.weight", (d, q)
            yield f"blk.{layer}.ffn_norm.weight", (d,)
            yield f"blk.{layer}.ffn_gate.weight", (self.d_ff, d)
            yield f"blk.{layer}.ffn_up.weight", (self.d_ff, d)
            yield f"blk.{layer}.ffn_down.weight", (d, self.d_ff)


def _positive_int(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.require(key, int) if default is None else file.get(key, int, default)
    if value < 1:
        raise ModelFileError(file.path, f"must be at least 1, and is {value}", key)
    return value


def _positive_float(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.require(key, float) if default is None else file.get(key, float, default)
    if not (math.isfinite(value) and value > 0):
        raise ModelFileError(file.path, f"must be finite and more than 0, and is {value}", key)
    return value


def _rope(file: GGUFFile, d_head: int) -> RopeConfig:
    """The rotary embedding.

    As in llama.cpp, a scaling factor without a scaling type means linear scaling, and `rope.scale_linear` is the
    factor's older name. A file made from a Llama 3.1 model carries that model's scaling as `rope_freqs.weight`.
    """
    dim = _positive_int(file, "llama.rope.dimension_count", d_head)
    if dim > d_head or dim % 2:
        raise ModelFileError(
            file.path, f"must be even and at most the head's {d_head}, and is {dim}", "llama.rope.dimension_count"
        )
    base = _positive_float(file, "llama.rope.freq_base", 10000.0)
    divisors = _rope_divisors(file, dim)
    scaling = file.get("llama.rope.scaling.type", str, "linear")
    if scaling == "none" or (scaling == "llama3" and divisors is not None):
        return RopeConfig(base=base, dim=dim, divisors=divisors)
    if scaling == "linear":
        older = _positive_float(file, "llama.rope.scale_linear", 1.0)
        factor = _positive_float(file, "llama.rope.scaling.factor", older)
        return RopeConfig(
            base=base, dim=dim, scaling="none" if factor == 1 else "linear", factor=factor, divisors=divisors
        )
    if scaling == "llama3":
        low = _positive_float(file, "llama.rope.scaling.low_freq_factor")
        high = _positive_float(file, "llama.rope.scaling.high_freq_factor")
        if low >= high:
            raise ModelFileError(
                file.path,
                f"must be more than the low factor {low}, and is {high}",
                "llama.rope.scaling.high_freq_factor",
            )
        return RopeConfig(
            base=base,
            dim=dim,
            scaling="llama3",
            factor=_positive_float(file, "llama.rope.scaling.factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=_positive_int(file, "llama.rope.scaling.original_context_length"),
        )
    raise ModelFileError(
        file.path,
        f"{reprlib.repr(scaling)} is not supported; supported are none, linear and llama3",
        "llama.rope.scaling.type",
    )


def _rope_divisors(file: GGUFFile, dim: int) -> tuple[float, ...] | None:
    info = file.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    if info.shape != (dim // 2,):
        raise ModelFileError(file.path, f"has shape {info.shape}, must be {(dim // 2,)}", info.name)
    divisors: NDArray[np.float32] = dequantize(unpack(info.type_id, file.data(info.name), info.shape))
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ModelFileError(file.path, "has values that are not finite and more than 0", info.name)
    return tuple(divisors.tolist())


def _check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Refuse a tensor that is missing, has the wrong shape, or that no kernel would look at."""
    known = set()
    # One by one, so that an absurd layer count stops at the first layer that is not there.
    for name, shape in config.tensor_shapes():
        info = file.tensors.get(name)
        if info is None:
            raise ModelFileError(file.path, "the file has no such tensor", name)
        if info.shape != shape:
            raise ModelFileError(file.path, f"has shape {info.shape}, must be {shape} by the metadata", name)
        known.add(name)
    for name in file.tensors:
        if name not in known:
            raise ModelFileError(
                file.path, "is a tensor this engine would have to ignore, which is not supported", name
            )
