import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from clients.cli import cli
from clients.verify import outcome
from engine.model import Model
from engine.verify import Count, Report
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def faulty_model(monkeypatch: pytest.MonkeyPatch):
    """Every model's logits depend on how many chunks are in the batch."""
    right = Model.forward

    def forward(self, chunks, cache):
        return right(self, chunks, cache) + np.float32(len(chunks) > 1)

    monkeypatch.setattr(Model, "forward", forward)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["verify", *arguments])


@pytest.mark.slow
def test_the_page_says_what_was_compared_with_what_and_the_verdict(model_file):
    result = run(model_file, "--seconds", "1", "--kernels", "reference", "--seed", "5")

    assert result.exit_code == 0, result.output
    model = Model.load(model_file, kernels="reference")
    for said in (
        f"tiny ({model_file})",
        f"reference ({model.cpu_path})",
        f"numpy {np.__version__}",
        f"{model.fingerprint('float16')} with a float16 cache",
        f"{model.fingerprint('float32')} with a float32 cache",
        "random mixes of seed 5",
    ):
        assert said in result.stdout
    assert result.stdout.splitlines()[-1].startswith("EXACT: ")
    assert len(result.stdout.splitlines()) < 50
    assert max(map(len, result.stdout.splitlines())) < 120 + len(model_file)


def test_what_there_was_no_time_to_try_is_not_shown_as_exact(model_file):
    page = run(model_file, "--seconds", "0", "--kernels", "compiled").stdout.splitlines()

    several = page[page.index("threads") + 2].split()
    assert several[1:] == ["0", "not", "tried"]
    assert (
        page[-1] == "EXACT: every row compared has, bit for bit, the logits it has alone. A longer run tries the rest."
    )


def test_what_was_tried_in_all_ways_leaves_no_rest(model_file):
    report = json.loads(run(model_file, "--seconds", "0", "--kernels", "reference", "--json").stdout)["report"]
    tried = msgspec.convert(report, Report)
    one = Count(num_rows=1, num_differing=0)
    kinds = {group: dict.fromkeys(counts, one) for group, counts in tried.kinds.items()}
    whole = msgspec.structs.replace(tried, kinds=kinds)
    page = outcome(Model.load(model_file, kernels="reference"), "auto", whole, 1.0).to_text()

    assert "not tried" not in page
    assert page.splitlines()[-1] == "EXACT: every row compared has, bit for bit, the logits it has alone."


@pytest.mark.slow
def test_compiled_kernels_run_the_mixes_by_one_and_by_several_threads(model_file):
    report = json.loads(run(model_file, "--seconds", "1", "--kernels", "compiled", "--json").stdout)["report"]

    (one, count), (several, other_count) = report["kinds"]["threads"].items()
    assert one == "1"
    assert int(several) >= 2
    assert count["num_rows"] > 0
    assert other_count["num_rows"] > 0


def test_json_holds_the_whole_report(model_file):
    report = json.loads(run(model_file, "--seconds", "0", "--json").stdout)

    assert report["is_exact"] is True
    assert report["path"] == model_file
    assert report["report"]["seed"] == 0
    assert report["report"]["total"]["num_rows"] == sum(
        count["num_rows"] for count in report["report"]["kinds"]["slot"].values()
    )


@pytest.mark.slow
@pytest.mark.usefixtures("faulty_model")
def test_a_difference_is_an_error_and_its_mix_can_be_run_again_as_the_page_says(model_file):
    result = run(model_file, "--seconds", "2")

    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("NOT EXACT: ")
    (line,) = (line for line in result.stdout.splitlines() if "run again" in line)
    again = run(*line.partition("lockstep verify ")[2].split())
    assert again.exit_code == 1
    assert "in 1 random mixes" in again.stdout

    def described(page: str) -> str:
        return page[page.index("first difference") :]

    assert described(again.stdout) == described(result.stdout)


def test_a_mix_alone_is_compared_whole(model_file):
    result = json.loads(run(model_file, "--mix", "9", "--json").stdout)

    assert result["report"]["num_mixes"] == 1
    assert result["report"]["num_sequences"] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--kernels", "fast"), "kernels must be one of"), (("--seed", "-1"), "-1"), (("--seconds", "-1"), "-1")],
)
def test_a_wrong_option_is_refused_in_words(model_file, arguments, message):
    result = run(model_file, *arguments)

    assert result.exit_code in {1, 2}
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_is_no_model_is_refused(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"nothing")

    result = run(str(tmp_path / "x.gguf"))

    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: ")
