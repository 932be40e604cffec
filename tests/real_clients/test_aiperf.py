"""`aiperf` measures 100 streamed chats and finds no error; its counts are the server's."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from clients.pull import resolve
from engine.gguf import GGUFFile
from tests.real_clients.conftest import MODEL

AIPERF = Path(os.environ["CLIENTS"]) / "aiperf" / "bin" / "aiperf"
REQUESTS, TOKENS = 100, 4


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with the model's vocabulary in the form aiperf reads, which would otherwise look for it on a hub."""
    with GGUFFile.open(resolve(MODEL)) as file:
        ids = {token: number for number, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    bpe = tokenizers.Tokenizer(models.BPE(ids, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def test_a_hundred_streamed_requests_without_an_error(server, tokenizer, tmp_path):
    before = {name: server.metric(name) for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")}
    command = [AIPERF, "profile", "--model", MODEL, "--url", server.url, "--endpoint-type", "chat", "--streaming"]
    command += ["--request-count", REQUESTS, "--concurrency", 8, "--isl", 8, "--osl", TOKENS, "--random-seed", 1]
    command += ["--extra-inputs", "ignore_eos:true", "--tokenizer", tokenizer, "--artifact-dir", tmp_path / "report"]
    command += ["--no-gpu-telemetry", "--ui", "none", "--workers-max", 1, "--record-processors", 1]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr

    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["error_summary"] == []
    assert report["request_error_rate"]["avg"] == 0
    assert report["time_to_first_token"]["min"] > 0
    assert report["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    generated = server.metric("vllm:generation_tokens_total") - before["vllm:generation_tokens_total"]
    assert generated == REQUESTS * TOKENS
    computed = server.metric("vllm:prompt_tokens_total") - before["vllm:prompt_tokens_total"]
    assert computed == report["total_usage_prompt_tokens"]["avg"]

    seen = json.loads((tmp_path / "report" / "server_metrics_export.json").read_text())
    assert seen["summary"]["endpoints_successful"] == [f"{server.url}/metrics"]
    assert "vllm:num_requests_running" in seen["metrics"]
