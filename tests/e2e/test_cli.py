"""The installed `lockstep` command with the real model."""

import json
import signal
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

from clients.pull import KNOWN_MODELS
from tests.live_server import live_server

LOCKSTEP = Path(sysconfig.get_path("scripts")) / "lockstep"


def lockstep(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(LOCKSTEP), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def refusal(*arguments: object) -> str:
    """The one line a command that refuses prints."""
    result = lockstep(*arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_pull_prints_the_path_of_the_model(model_path):
    result = lockstep("pull", "smollm2-135m")
    assert (result.returncode, result.stdout) == (0, f"{model_path}\n")
    assert model_path.stat().st_size == KNOWN_MODELS["smollm2-135m"].n_bytes


def test_generate_gives_bit_for_bit_the_servers_answer(model_path, server):
    served = server.chat("Name three colors.", temperature=0, max_tokens=12).json["choices"][0]["message"]["content"]
    alone = lockstep("generate", "Name three colors.", "--model", model_path, "--max-tokens", 12)
    assert alone.stdout == served + "\n"


def test_chat_streams_the_servers_answer(server):
    served = server.chat("Hi", temperature=0, max_tokens=8).json["choices"][0]["message"]["content"]
    options = ("--url", server.url, "--temperature", 0, "--max-tokens", 8)
    assert lockstep("chat", *options, stdin="Hi\n").stdout == served + "\n"


def test_bench_measures_a_server_and_saves_what_it_measured(server, tmp_path):
    load = ("--clients", 4, "--num-prompts", 6, "--input-len", 12, "--output-len", 4)
    result = lockstep("bench", "serve", "--url", server.url, *load, "--save-result", tmp_path / "result.json")
    assert result.returncode == 0, result.stderr
    assert "============ Serving Benchmark Result ============" in result.stdout
    saved = json.loads((tmp_path / "result.json").read_text())
    assert (saved["completed"], saved["failed"]) == (6, 0)
    assert saved["input_lens"] == [12] * 6
    assert saved["output_lens"] == [4] * 6
    assert 0 < saved["mean_ttft_ms"] <= saved["mean_e2el_ms"]
    assert saved["output_throughput"] == pytest.approx(24 / saved["duration"])


def test_serve_ends_with_code_0_on_sigterm(model_path):
    with live_server(model_path) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0


def test_a_port_in_use_is_one_line(model_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refusal("serve", model_path, "--port", port)


@pytest.mark.parametrize("content", [b"", b"GGML", b"<!DOCTYPE html><html></html>"])
def test_a_file_that_is_no_model_is_one_line_naming_it(tmp_path, content):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert str(path) in refusal("serve", path, "--port", 0)
    assert str(path) in refusal("generate", "Hi", "--model", path)


def test_chat_without_a_server_says_how_to_start_one():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "lockstep serve" in refusal("chat", "--url", f"http://127.0.0.1:{port}")
