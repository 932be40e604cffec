import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from engine.config import ModelConfig
from engine.errors import ModelFileError
from engine.gguf import GGUFFile
from engine.rope import RopeConfig
from tests.gguf_writer import RawTensor
from tests.random_blocks import QUANTIZED
from tests.tiny_model import vocabulary, write_as_float32, write_tiny_llama

REQUIRED = (
    "general.architecture",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.tokens",
)
COUNTS = (
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.rope.dimension_count",
)


def config_of(path: Path) -> ModelConfig:
    with GGUFFile.open(path) as file:
        return ModelConfig.from_gguf(file)


@pytest.fixture
def config_with(tmp_path):
    """The configuration of a tiny model with some keys and tensors changed, added, or taken away by None."""

    def load(metadata=None, tensors=None, **kwargs):
        return config_of(write_tiny_llama(tmp_path / "x.gguf", metadata=metadata, tensors=tensors, **kwargs))

    return load


@pytest.fixture
def refused(config_with):
    """The reason why such a model is refused; the subject of the refusal must be the one given."""

    def load(subject, metadata=None, tensors=None, **kwargs):
        with pytest.raises(ModelFileError) as caught:
            config_with(metadata, tensors, **kwargs)
        assert caught.value.subject == subject
        assert caught.value.path.endswith("x.gguf")
        assert "\n" not in str(caught.value)
        return caught.value.reason

    return load


def test_every_hyperparameter_is_read(config_with):
    config = config_with(
        n_layers=3, d_model=96, n_heads=6, n_kv_heads=3, d_head=32, d_ff=160, max_context=77, tied=False,
        metadata={"llama.rope.dimension_count": 16, "llama.rope.freq_base": 500000.0, "general.name": "A name"},
    )  # fmt: skip

    assert config == ModelConfig(
        architecture="llama",
        name="A name",
        n_layers=3,
        d_model=96,
        n_heads=6,
        n_kv_heads=3,
        d_head=32,
        d_ff=160,
        vocab_size=len(vocabulary()["tokenizer.ggml.tokens"]),
        max_context=77,
        norm_eps=float(np.float32(1e-5)),
        rope=RopeConfig(base=500000.0, dim=16),
        tied=False,
    )


def test_what_may_be_missing_has_the_format_s_default(config_with):
    config = config_with(
        n_kv_heads=4,
        metadata={
            "general.name": None,
            "llama.attention.head_count_kv": None,
            "llama.rope.dimension_count": None,
            "llama.rope.freq_base": None,
        },
    )

    assert (config.name, config.n_kv_heads, config.d_head) == ("x", 4, 16)
    assert config.rope == RopeConfig(base=10000.0, dim=16)


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", *QUANTIZED])
def test_the_type_of_the_weights_does_not_change_the_configuration(tmp_path, quant):
    quantized = write_tiny_llama(tmp_path / "quantized.gguf", quant=quant)

    plain = write_as_float32(quantized, tmp_path / "plain.gguf")

    assert config_of(quantized) == config_of(plain)


def test_without_an_output_tensor_the_head_is_the_embedding(config_with):
    assert config_with(tied=True).tied
    assert not config_with(tied=False).tied


def test_the_tensors_of_a_model_are_those_of_its_file(tmp_path):
    path = write_tiny_llama(
        tmp_path / "x.gguf", tied=False, d_head=24, tensors={"rope_freqs.weight": np.ones(12, np.float32)}
    )

    with GGUFFile.open(path) as file:
        shapes = dict(ModelConfig.from_gguf(file).tensor_shapes())
        assert shapes == {name: info.shape for name, info in file.tensors.items()}


# --- keys that are missing or wrong


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_hyperparameter_is_named(refused, key):
    assert "no such metadata key" in refused(key, {key: None})


@pytest.mark.parametrize("architecture", ["qwen9", "LLAMA", "", "mamba", "x" * 10_000, "a\nb"])
def test_another_architecture_is_refused_by_name(refused, architecture):
    reason = refused("general.architecture", {"general.architecture": architecture})

    assert repr(architecture)[:10] in reason
    assert len(reason) < 200


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1, -(2**63)])
def test_a_count_below_one_is_refused(refused, key, value):
    assert f"at least 1, and is {value}" in refused(key, {key: value})


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [2.0, "2", True, [2], np.array([4, 4], np.int32)])
def test_a_count_of_another_type_is_refused(refused, key, value):
    assert "must be an integer" in refused(key, {key: value})


@pytest.mark.parametrize(
    "key", ["llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.rope.scaling.factor"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_number_that_is_not_finite_and_positive_is_refused(refused, key, value):
    assert f"and is {value}" in refused(key, {key: value})


@pytest.mark.parametrize("key", ["llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"])
def test_a_number_of_another_type_is_refused(refused, key):
    assert "must be a floating-point number" in refused(key, {key: 1})


def test_heads_must_divide(refused):
    assert "3 does not divide the 4" in refused("llama.attention.head_count_kv", {"llama.attention.head_count_kv": 3})
    assert "8 does not divide the 4" in refused("llama.attention.head_count_kv", {"llama.attention.head_count_kv": 8})
    assert "7 does not divide the embedding" in refused(
        "llama.attention.head_count", {"llama.attention.head_count": 7, "llama.attention.head_count_kv": 7}
    )


def test_values_as_wide_as_keys_only(refused):
    assert "key length 16" in refused("llama.attention.value_length", {"llama.attention.value_length": 8})


@pytest.mark.parametrize("dim", [15, 18, 2**31])
def test_a_rotary_width_that_is_odd_or_wider_than_the_head_is_refused(refused, dim):
    assert f"and is {dim}" in refused("llama.rope.dimension_count", {"llama.rope.dimension_count": dim})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.causal", False),
        ("attention.scale", 0.25),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.kv_lora_rank", 512),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("logit_scale", math.nan),
        ("logit_scale", "1.0"),
        ("logit_scale", np.ones(2, np.float32)),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.22),
        ("use_parallel_residual", True),
        ("rope.scaling.attn_factor", 1.2),
    ],
)
def test_a_key_that_asks_for_what_is_not_computed_is_refused(refused, key, value):
    assert "is not supported" in refused(f"llama.{key}", {f"llama.{key}": value})


def test_such_a_key_with_a_value_that_changes_nothing_is_fine(config_with):
    plain = config_with()

    assert plain == config_with(
        {"llama.expert_count": 0, "llama.attention.causal": True, "llama.logit_scale": 1.0, "llama.made_up": 3}
    )


def test_a_sliding_window_limits_the_context_to_where_it_changes_nothing(config_with, refused):
    assert config_with({"llama.attention.sliding_window": 100}, max_context=256).max_context == 100
    assert config_with({"llama.attention.sliding_window": 1000}, max_context=256).max_context == 256
    assert config_with({"llama.attention.sliding_window": 0}, max_context=256).max_context == 256
    for value in (-1, 1.5, np.array([64, 0], np.int32)):
        refused("llama.attention.sliding_window", {"llama.attention.sliding_window": value})


# --- the rotary embedding


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeConfig(base=10000.0, dim=16)),
        ({"llama.rope.scaling.type": "linear"}, RopeConfig(base=10000.0, dim=16)),
        ({"llama.rope.scaling.factor": 1.0}, RopeConfig(base=10000.0, dim=16)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeConfig(base=10000.0, dim=16, scaling="linear", factor=4.0),
        ),
        ({"llama.rope.scaling.factor": 2.0}, RopeConfig(base=10000.0, dim=16, scaling="linear", factor=2.0)),
        ({"llama.rope.scale_linear": 8.0}, RopeConfig(base=10000.0, dim=16, scaling="linear", factor=8.0)),
        (
            {
                "llama.rope.scaling.type": "llama3",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.low_freq_factor": 1.0,
                "llama.rope.scaling.high_freq_factor": 4.0,
                "llama.rope.scaling.original_context_length": 8192,
            },
            RopeConfig(
                base=10000.0, dim=16, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_context=8192,
            ),
        ),
    ],
)  # fmt: skip
def test_rope_scaling_is_read(config_with, metadata, expected):
    assert config_with(metadata).rope == expected


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", "su", "", "Linear"])
def test_another_kind_of_rope_scaling_is_refused_by_name(refused, kind):
    assert repr(kind) in refused("llama.rope.scaling.type", {"llama.rope.scaling.type": kind})


def test_llama3_scaling_needs_its_numbers(refused):
    keys = ["factor", "low_freq_factor", "high_freq_factor", "original_context_length"]
    metadata = {"llama.rope.scaling.type": "llama3"} | dict(
        zip([f"llama.rope.scaling.{key}" for key in keys], [8.0, 1.0, 4.0, 8192], strict=True)
    )
    for key in keys:
        assert "no such metadata key" in refused(
            f"llama.rope.scaling.{key}", metadata | {f"llama.rope.scaling.{key}": None}
        )
    refused("llama.rope.scaling.high_freq_factor", metadata | {"llama.rope.scaling.high_freq_factor": 1.0})


@pytest.mark.parametrize("metadata", [{}, {"llama.rope.scaling.type": "llama3"}, {"llama.rope.scaling.type": "none"}])
def test_the_rope_freqs_tensor_is_applied(config_with, metadata):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)

    rope = config_with(metadata, {"rope_freqs.weight": divisors}).rope

    assert rope.divisors == tuple(divisors.tolist())
    assert rope.inverse_frequencies() == pytest.approx(
        RopeConfig(base=10000.0, dim=16).inverse_frequencies() / divisors
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_rope_freqs_tensor_that_cannot_divide_is_refused(refused, bad):
    divisors = np.ones(8, np.float32)
    divisors[3] = bad

    assert "not finite" in refused("rope_freqs.weight", tensors={"rope_freqs.weight": divisors})


def test_a_rope_freqs_tensor_of_another_length_is_refused(refused):
    assert "must be (8,)" in refused("rope_freqs.weight", tensors={"rope_freqs.weight": np.ones(16, np.float32)})


# --- tensors


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_q.weight",
        "blk.1.ffn_down.weight",
        "blk.1.attn_norm.weight",
    ],
)
def test_a_missing_tensor_is_named(refused, name):
    assert "no such tensor" in refused(name, tensors={name: None})


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.bias",
        "blk.1.attn_output.bias",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_down_exps.weight",
        "blk.0.attn_q_norm.weight",
        "blk.2.attn_norm.weight",
        "blk.00.attn_norm.weight",
        "output.bias",
        "rope_factors_long.weight",
        "token_types.weight",
        "anything",
    ],
)
def test_a_tensor_that_would_be_ignored_is_refused(refused, name):
    assert "ignore" in refused(name, tensors={name: np.zeros(64, np.float32)})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("token_embd.weight", (64, 263)),
        ("token_embd.weight", (262, 64)),
        ("output_norm.weight", (32,)),
        ("blk.0.attn_q.weight", (64, 32)),
        ("blk.0.attn_k.weight", (64, 64)),
        ("blk.1.ffn_down.weight", (96, 64)),
        ("blk.1.ffn_norm.weight", (1, 64)),
    ],
)
def test_a_tensor_of_another_shape_than_the_metadata_implies_is_refused(refused, name, shape):
    reason = refused(name, tensors={name: RawTensor(0, shape, np.zeros(shape, np.float32).tobytes())})

    assert f"has shape {shape}, must be" in reason


@pytest.mark.parametrize(
    ("key", "subject"),
    [
        ("llama.block_count", "blk.2.attn_norm.weight"),
        ("llama.embedding_length", "token_embd.weight"),
        ("llama.feed_forward_length", "blk.0.ffn_gate.weight"),
    ],
)
def test_an_absurd_size_is_refused_at_the_first_tensor_without_costing_memory(refused, key, subject):
    tracemalloc.start()
    refused(subject, {key: 2**32 - 4})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 8 << 20


def test_more_tokens_than_rows_in_the_embedding_are_refused(refused):
    tokens = [*vocabulary()["tokenizer.ggml.tokens"], "one more"]

    with_one_more = RawTensor(0, (263, 64), bytes(263 * 64 * 4))
    reason = refused(
        "token_embd.weight", {"tokenizer.ggml.tokens": tokens}, tensors={"token_embd.weight": with_one_more}
    )
    assert "must be (264, 64)" in reason
