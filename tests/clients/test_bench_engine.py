import json
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clients.cli import cli
from engine.config import ModelConfig
from engine.cost import multiply_adds, weight_bytes
from engine.gguf import GGUFFile
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", max_context=256))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "engine", *arguments])


@pytest.mark.slow
def test_every_number_saved_follows_from_the_seconds_measured(model_file: str, tmp_path: Path):
    saved = tmp_path / "result.json"
    shape = (
        "--batch",
        "1",
        "--batch",
        "3",
        "--context",
        "20",
        "--context",
        "64",
        "--steps",
        "2",
        "--repeats",
        "3",
        "--threads",
        "1",
    )

    result = run(model_file, *shape, "--save-result", str(saved))

    assert result.exit_code == 0, result.output
    numbers = json.loads(saved.read_text())
    with GGUFFile.open(model_file) as file:
        config, step_bytes = ModelConfig.from_gguf(file), weight_bytes(file)
    dots = statistics.median(numbers["limits"]["multiply_adds_per_s"])
    read = statistics.median(numbers["limits"]["bytes_per_s"])
    assert len(numbers["limits"]["bytes_per_s"]) == 3
    assert numbers["limits"]["threads"] == 1
    assert [(f["phase"], f["context"], f["batch"]) for f in numbers["figures"]] == [
        (phase, context, batch) for phase in ("prefill", "decode") for context in (20, 64) for batch in (1, 3)
    ]
    for figure in numbers["figures"]:
        num_tokens = figure["batch"] * (figure["context"] if figure["phase"] == "prefill" else 2)
        num_logits = figure["batch"] * (1 if figure["phase"] == "prefill" else 2)
        assert len(figure["seconds"]) == 3
        seconds = statistics.median(figure["seconds"])
        products = multiply_adds(config, num_tokens, num_logits)
        assert figure["tokens_per_s"] == pytest.approx(num_tokens / seconds)
        assert figure["multiply_adds_per_s"] == pytest.approx(products / seconds)
        assert figure["multiply_adds_share"] == pytest.approx(products / seconds / dots)
        assert figure["read_share"] == pytest.approx(step_bytes * figure["num_forwards"] / seconds / read)
        row = f"{figure['phase']:7}{figure['context']:>8}{figure['batch']:>7}{figure['tokens_per_s']:>11.1f}"
        assert row in result.stdout
    assert numbers["memory"]["loaded"] >= numbers["memory"]["before"] > 1e6
    assert numbers["kernels"] in result.stdout


def test_what_does_not_fit_the_model_is_left_out_and_named(model_file: str):
    result = run(model_file, "--batch", "1", "--context", "32", "--context", "256", "--repeats", "1", "--steps", "1")

    assert result.exit_code == 0, result.output
    assert "context 256 is left out: with 1 steps it is over 256" in result.stdout
    assert "decode       32" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "5000"), "Error: context 5000 is left out"),
        (("--kernels", "fast"), "kernels must be one of"),
        (("--kv-dtype", "int3"), "int3"),
        (("--batch", "0"), "0"),
    ],
)
def test_a_wrong_option_is_refused_in_words(model_file: str, arguments: tuple[str, ...], message: str):
    result = run(model_file, *arguments)

    assert result.exit_code in {1, 2}
    assert message in result.stderr
    assert "Traceback" not in result.stderr
