from pathlib import Path

import gguf
import numpy as np

from engine.config import ModelConfig
from engine.gguf import GGUFFile
from engine.quants import BLOCK_FORMATS, dequantize, unpack
from engine.rope import RopeConfig


def test_the_default_model_s_configuration(model_path: Path):
    with GGUFFile.open(model_path) as file:
        config = ModelConfig.from_gguf(file)

    assert config == ModelConfig(
        architecture="llama",
        name="Smollm2 135M 8k Lc100K Mix1 Ep2",
        n_layers=30,
        d_model=576,
        n_heads=9,
        n_kv_heads=3,
        d_head=64,
        d_ff=1536,
        vocab_size=49152,
        max_context=8192,
        norm_eps=float(np.float32(1e-5)),
        rope=RopeConfig(base=100000.0, dim=64),
        tied=True,
    )


def test_every_tensor_and_key_of_the_default_model_is_what_the_gguf_package_reads(model_path: Path):
    oracle = gguf.GGUFReader(model_path)

    with GGUFFile.open(model_path) as file:
        assert [*file.metadata] == [key for key in oracle.fields if not key.startswith("GGUF.")]
        assert file.metadata["tokenizer.ggml.tokens"] == oracle.fields["tokenizer.ggml.tokens"].contents()
        assert file.metadata["tokenizer.ggml.merges"] == oracle.fields["tokenizer.ggml.merges"].contents()
        assert [*file.tensors] == [tensor.name for tensor in oracle.tensors]
        for tensor in oracle.tensors:
            info = file.tensors[tensor.name]
            weights = dequantize(unpack(info.type_id, file.data(info.name), info.shape))
            assert np.array_equal(weights, gguf.quants.dequantize(tensor.data, tensor.tensor_type)), info.name
        names = [BLOCK_FORMATS[info.type_id].name for info in file.tensors.values()]

    assert {name: names.count(name) for name in names} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
