"""Files that cannot be served: one line with file and reason, an exit code, no traceback."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import pack

import psutil
import pytest

from tests.gguf_writer import RawTensor, Typed, gguf_bytes
from tests.live_server import HANG_GUARD_S, live_server
from tests.tiny_model import CHATML, write_tiny_llama

ARCHITECTURE = {"general.architecture": "llama"}
HEADER_ONLY = {
    "zero dimension": gguf_bytes(ARCHITECTURE, {"t": RawTensor(0, (0, 4), b"")}),
    "overflowing dimensions": gguf_bytes(ARCHITECTURE, {"t": RawTensor(0, (2**40, 2**40), b"")}),
    "empty key": gguf_bytes([("", 1)]),
    "alignment 0": gguf_bytes({"general.alignment": 0}),
    "alignment 3": gguf_bytes({"general.alignment": 3}),
    "alignment 2**31": gguf_bytes({"general.alignment": 2**31}),
    "alignment as text": gguf_bytes({"general.alignment": "32"}),
    "magic GGML": gguf_bytes(magic=b"GGML"),
    "a web page": b"<!doctype html><html><body>404</body></html>",
    "an empty file": b"",
    "three bytes": b"GGU",
    "version 0": gguf_bytes(version=0),
    "version 1": gguf_bytes(version=1),
    "version 99": gguf_bytes(version=99),
    "big-endian": b"GGUF\x00\x00\x00\x03" + pack(">QQ", 0, 0),
    "a thousand billion keys": gguf_bytes(n_keys=10**12),
    "a thousand billion tensors": gguf_bytes(n_tensors=10**12),
    "a key longer than the file": gguf_bytes() + pack("<Q", 2**60),
    "an array longer than the file": gguf_bytes({"a": Typed(9, pack("<IQ", 4, 2**61))}),
    "a value of unknown type": gguf_bytes({"a": Typed(77, b"")}),
    "tensor type 39": gguf_bytes(ARCHITECTURE, {"t": RawTensor(39, (32,), bytes(18))}),
    "tensor type 4": gguf_bytes(ARCHITECTURE, {"t": RawTensor(4, (32,), bytes(18))}),
    "tensor type 2**32-1": gguf_bytes(ARCHITECTURE, {"t": RawTensor(2**32 - 1, (32,), bytes(18))}),
    "no metadata at all": gguf_bytes(),
}
BROKEN_MODELS = {
    "no merges": ({"tokenizer.ggml.merges": None}, {}, "tokenizer.ggml.merges"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, {}, "tokenizer.ggml.tokens"),
    "unknown architecture": ({"general.architecture": "qwen9"}, {}, "qwen9"),
    "no block count": ({"llama.block_count": None}, {}, "llama.block_count"),
    "a missing tensor": ({}, {"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight"),
    "an unknown pre-tokenizer": ({"tokenizer.ggml.pre": "martian"}, {}, "martian"),
    "a template that is no template": ({"tokenizer.chat_template": "{% if %}"}, {}, "template"),
}


def refusal(path: Path) -> str:
    """What `lockstep serve` says of the file, having checked that it says it in one line and goes."""
    command = [sys.executable, "-m", "clients.cli", "serve", str(path), "--port", "0", "--kernels", "reference"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
    assert ended.returncode not in {0, None}
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    complaints = [line for line in ended.stderr.splitlines() if path.name in line and "loading" not in line]
    assert len(complaints) == 1, ended.stderr
    return complaints[0]


@pytest.mark.parametrize("content", HEADER_ONLY.values(), ids=HEADER_ONLY.keys())
def test_45_and_47_a_file_that_is_no_model_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    refusal(path)


@pytest.mark.parametrize(("metadata", "tensors", "named"), BROKEN_MODELS.values(), ids=BROKEN_MODELS.keys())
def test_47_what_is_missing_or_unknown_is_named(tmp_path, metadata, tensors, named):
    path = write_tiny_llama(tmp_path / "broken.gguf", metadata=metadata, tensors=tensors)
    assert named in refusal(path)


def test_47_big_endian_files_are_called_so(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(HEADER_ONLY["big-endian"])
    assert "big-endian" in refusal(path)


def test_49_a_template_cannot_reach_the_system(tmp_path):
    marker = tmp_path / "marker"
    attacks = [
        "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
        "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(10**12) %}x{% endfor %}",
    ]
    for number, attack in enumerate(attacks):
        template = attack.replace("MARKER", str(marker))
        path = write_tiny_llama(tmp_path / f"{number}.gguf", chat_template=template)
        with live_server(path, "--kernels", "reference") as server:
            server.chat("Hi", max_tokens=1).refused(400)
            assert server.complete("Hi", max_tokens=1).status == 200
        assert not marker.exists()


def test_49_a_template_that_never_ends_ends_its_own_request_only(tmp_path):
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    bombs = "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    attacks = (
        f"{{% if messages[0].content == 'loop' %}}{loops}{{% elif messages[0].content == 'bomb' %}}{bombs}{{% endif %}}"
    )
    path = write_tiny_llama(tmp_path / "tiny.gguf", chat_template=attacks + CHATML, max_context=4096)
    with live_server(path, "--kernels", "reference") as server:
        size = psutil.Process(server.process.pid).memory_info().rss
        with ThreadPoolExecutor() as pool:
            body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
            streaming = pool.submit(server.stream, "/v1/completions", body)
            attacking = [pool.submit(server.chat, attack, max_tokens=1) for attack in ("loop", "bomb", "loop")]
            for attack in attacking:
                attack.result().refused(400)
            assert streaming.result().finish_reasons() == ["length"]
        assert server.chat("Hi", max_tokens=1).status == 200
        assert psutil.Process(server.process.pid).memory_info().rss - size < 100 * 2**20


def test_49_without_a_template_chat_is_refused_and_completions_work(tmp_path):
    path = write_tiny_llama(tmp_path / "plain.gguf", chat_template=None)
    with live_server(path, "--kernels", "reference") as server:
        server.chat("Hi", max_tokens=1).refused(400)
        assert server.complete("Hi", max_tokens=1).status == 200


def test_a_tied_model_with_a_template_answers(tmp_path):
    path = write_tiny_llama(tmp_path / "tiny.gguf", chat_template=CHATML, tied=True)
    with live_server(path, "--kernels", "reference") as server:
        assert server.chat("Hi", max_tokens=3, temperature=0).json["usage"]["completion_tokens"] >= 1
