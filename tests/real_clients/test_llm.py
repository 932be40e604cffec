"""The `llm` command, told of Lockstep in its extra-openai-models.yaml."""

import json
import os
import signal
import subprocess
import sys

import pytest

LLM = [sys.executable, "-m", "llm"]
BRIEF = ["-o", "temperature", "0", "-o", "max_tokens", "6"]


@pytest.fixture
def environment(tmp_path, base_url):
    """A user's folder with two models, one of which the server does not have."""
    models = [
        {"model_id": "lockstep", "model_name": "smollm2-135m", "api_base": base_url},
        {"model_id": "nowhere", "model_name": "gpt-7", "api_base": base_url},
        {"model_id": "completion", "model_name": "smollm2-135m", "api_base": base_url, "completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # which is YAML too
    return os.environ | {"LLM_USER_PATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def llm(environment):
    def run(*arguments):
        return subprocess.run([*LLM, *arguments], env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("option", [["--no-stream"], []], ids=["plain", "streamed"])
def test_a_prompt_is_answered_and_counted(llm, hello, option):
    run = llm("-m", "lockstep", "Hi", *BRIEF, *option, "--usage")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == hello.strip()
    assert "31 input" in run.stderr
    assert "6 output" in run.stderr


def test_a_conversation_goes_on(llm):
    assert llm("-m", "lockstep", "Hi", *BRIEF).returncode == 0
    again = llm("-c", "What did I say?", *BRIEF)
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip()


def test_a_completion_model_goes_on_from_text(llm):
    run = llm("-m", "completion", "The capital of France is", *BRIEF)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


def test_a_refusal_is_shown_in_one_line(llm):
    run = llm("-m", "nowhere", "Hi")
    assert run.returncode == 1
    assert "gpt-7" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.usefixtures("ends_early")
def test_an_interrupted_command_frees_the_slot(environment):
    command = [*LLM, "-m", "lockstep", "Write a long story.", "-o", "max_tokens", "900"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode != 0
