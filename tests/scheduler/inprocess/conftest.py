import pytest

from engine.generate import generate
from engine.model import Model
from engine.params import SamplingParams
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", max_context=512)


@pytest.fixture(scope="session")
def model(path):
    return Model.load(path, kernels="reference")


@pytest.fixture
def alone(model):
    """What `generate` gives for a prompt."""

    def answer(prompt, **params):
        return generate(model, model.tokenizer, prompt, SamplingParams(**params), kv_dtype="float16")

    return answer
