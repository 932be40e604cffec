import pytest

from engine.batch import Chunk
from engine.errors import ModelFileError, ParamError
from engine.model import Model
from tests.tiny_model import write_tiny_llama


@pytest.fixture
def path(tmp_path):
    return write_tiny_llama(tmp_path / "m.gguf")


def test_a_loaded_model_knows_its_file_tokenizer_template_and_kernels(path):
    model = Model.load(path)
    assert model.path == path
    assert model.config.n_layers == 2
    assert 2 in model.tokenizer.eos_ids
    assert model.chat_template.render([{"role": "user", "content": "Hi"}]).text.startswith("<|im_start|>user\nHi")
    assert model.kernels in {"reference", "compiled"}
    assert Model.load(str(path), kernels="reference").kernels == "reference"


def test_a_file_without_a_template_has_none(tmp_path):
    assert Model.load(write_tiny_llama(tmp_path / "m.gguf", chat_template=None)).chat_template is None


def test_a_template_that_does_not_compile_is_the_files_fault(tmp_path):
    path = write_tiny_llama(tmp_path / "m.gguf", chat_template="{% if %}")
    with pytest.raises(ModelFileError, match=r"m\.gguf: tokenizer\.chat_template: does not compile"):
        Model.load(path)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "page.gguf"
    path.write_text("<html>not found</html>")
    with pytest.raises(ModelFileError, match="is not a GGUF file"):
        Model.load(path)


def test_kernels_nobody_knows_are_refused_by_name(path):
    with pytest.raises(ParamError, match="'cuda'") as refusal:
        Model.load(path, kernels="cuda")
    assert refusal.value.param == "kernels"


def test_progress_goes_from_nothing_to_everything_stage_by_stage(path):
    seen = []
    Model.load(path, progress=lambda stage, fraction: seen.append((stage, fraction)))
    stages = list(dict.fromkeys(stage for stage, _ in seen))
    assert stages == ["packing weights", "hashing the file"]
    for stage in stages:
        fractions = [fraction for s, fraction in seen if s == stage]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0, 1)


def test_the_file_may_vanish_once_the_model_is_loaded(path):
    model = Model.load(path)
    path.write_bytes(b"")
    path.unlink()
    assert model.forward([Chunk(0, 0, (1, 2))], model.new_cache(1, 2)).shape == (1, model.config.vocab_size)


@pytest.mark.parametrize("token_id", [-1, 263, 2**40])
def test_a_token_outside_the_vocabulary_is_refused_and_changes_nothing(path, token_id):
    model = Model.load(path)
    cache = model.new_cache(2, 8)
    with pytest.raises(ParamError, match=f"got {token_id}"):
        model.forward([Chunk(0, 0, (1, 2)), Chunk(1, 0, (3, token_id))], cache)
    assert [cache.seq_len(slot=slot) for slot in range(2)] == [0, 0]


def test_fingerprint_is_the_same_for_the_same_model_wherever_it_lies(path, tmp_path):
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(path.read_bytes())
    fingerprint = Model.load(path).fingerprint("float16")
    assert fingerprint == Model.load(copy).fingerprint("float16")
    assert fingerprint.startswith("fp_")
    assert len(fingerprint) == len("fp_") + 16


def test_fingerprint_tells_apart_files_kernels_and_cache_dtypes(path, tmp_path):
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    other = tmp_path / "other.gguf"
    other.write_bytes(changed)
    prints = {
        Model.load(path, kernels="reference").fingerprint("float16"),
        Model.load(path, kernels="reference").fingerprint("float32"),
        Model.load(path, kernels="reference-int8").fingerprint("float16"),
        Model.load(other, kernels="reference").fingerprint("float16"),
    }
    assert len(prints) == 4
