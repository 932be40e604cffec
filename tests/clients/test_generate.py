import pytest
from click.testing import CliRunner, Result

from clients.cli import cli
from engine.generate import generate
from engine.model import Model
from engine.params import SamplingParams
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["generate", *arguments], input=stdin)


def expected(model_file: str, prompt_ids: list[int], **params: object) -> str:
    model = Model.load(model_file)
    limits = {"max_tokens": 12, "temperature": 0.0, "seed": 0, **params}
    return generate(model, model.tokenizer, prompt_ids, SamplingParams(**limits), kv_dtype="float16").text


def test_a_prompt_is_answered_as_a_chat_message(model_file):
    model = Model.load(model_file)
    prompt_ids = model.chat_template.render([{"role": "user", "content": "Hi"}]).encode(model.tokenizer)
    result = run("Hi", "--model", model_file, "--max-tokens", "12")
    assert result.exit_code == 0, result.output
    assert result.stdout == expected(model_file, prompt_ids) + "\n"
    assert f"{len(prompt_ids)} prompt tokens in" in result.stderr


def test_no_token_asked_for_claims_no_work(model_file):
    result = run("Hi", "--raw", "--model", model_file, "--max-tokens", "0")
    assert result.stdout == "\n"
    assert result.stderr.endswith("prompt tokens, not computed: no token was asked for\n")


def test_a_raw_prompt_is_gone_on_from(model_file):
    prompt_ids = Model.load(model_file).tokenizer.encode("Hi")
    arguments = ("--raw", "--model", model_file, "--max-tokens", "12", "--temperature", "1", "--seed", "7")
    assert run("Hi", *arguments).stdout == expected(model_file, prompt_ids, temperature=1.0, seed=7) + "\n"


def test_a_dash_reads_the_prompt_from_stdin(model_file):
    arguments = ("--model", model_file, "--max-tokens", "12")
    assert run("-", *arguments, stdin="Hi").stdout == run("Hi", *arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "temperature must be finite and >= 0.0, got -1.0"),
        (("--kernels", "fast"), "kernels must be one of"),
        (("--kv-dtype", "int3"), "int3"),
        (("--model", "nope"), "nope: no such file, and not a known model"),
    ],
)
def test_a_wrong_option_is_one_line(model_file, arguments, message):
    result = run("Hi", "--model", model_file, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
