from pathlib import Path

import numpy as np

from engine.config import ModelConfig
from engine.cost import multiply_adds, weight_bytes
from engine.gguf import GGUFFile
from engine.rope import RopeConfig
from tests.tiny_model import write_tiny_llama

SMOLLM2 = ModelConfig(
    architecture="llama",
    name="SmolLM2 135M",
    n_layers=30,
    d_model=576,
    n_heads=9,
    n_kv_heads=3,
    d_head=64,
    d_ff=1536,
    vocab_size=49152,
    max_context=8192,
    norm_eps=1e-5,
    rope=RopeConfig(base=100000.0, dim=64),
    tied=True,
)


def test_multiply_adds_are_those_counted_by_hand():
    # q and o: 576 x 576 each; k and v: 576 x 192 each; gate, up and down: 576 x 1536 each; 30 layers.
    row = 30 * (2 * 331_776 + 2 * 110_592 + 3 * 884_736)
    head = 576 * 49_152

    assert row == 106_168_320
    assert head == 28_311_552
    assert multiply_adds(SMOLLM2, 1, 0) == row
    assert multiply_adds(SMOLLM2, 0, 1) == head
    assert multiply_adds(SMOLLM2, 128, 1) == 128 * row + head


def test_a_row_with_logits_uses_every_weight_of_a_matrix_once(tmp_path: Path):
    path = write_tiny_llama(
        tmp_path / "model.gguf", n_layers=3, n_heads=6, n_kv_heads=2, d_head=32, d_ff=160, tied=False
    )

    with GGUFFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        matrices = [
            info.shape
            for name, info in file.tensors.items()
            if name.endswith(".weight") and len(info.shape) == 2 and name != "token_embd.weight"
        ]

    assert multiply_adds(config, 1, 1) == sum(np.prod(shape) for shape in matrices)


def test_the_embedding_is_read_by_a_step_only_where_it_is_the_head(tmp_path: Path):
    def of(*, tied: bool) -> int:
        with GGUFFile.open(write_tiny_llama(tmp_path / "model.gguf", quant="Q8_0", tied=tied)) as file:
            config = ModelConfig.from_gguf(file)
            assert weight_bytes(file) == multiply_adds(config, 1, 1) // 32 * 34
            return weight_bytes(file)

    assert of(tied=True) == of(tied=False)
