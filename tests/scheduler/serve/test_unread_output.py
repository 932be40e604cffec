"""A server serves even if nobody reads what it prints: `lockstep serve 2>&1 | head -n 1`, a full disk, no stderr."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live_server import HANG_GUARD_S, LiveServer, wait_for
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def gone_reader():
    """The writing end of a pipe that nobody reads; it is the shell's stdin, which `>&0` makes an output."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def _is_up(server):
    assert server.process.poll() is None, f"the server has ended with {server.process.returncode}"
    try:
        return server.get("/health").status == 200
    except ConnectionError:
        return False


@pytest.mark.parametrize("redirection", ["2>&0", ">&0 2>&0", "2>&-", ">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_output_that_cannot_be_written_does_not_end_the_server(model, gone_reader, redirection):
    port = _free_port()
    options = ("--port", str(port), "--kernels", "reference")
    serve = [sys.executable, "-m", "clients.cli", "serve", str(model), *options]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    process = subprocess.Popen([*shell, *serve], stdin=gone_reader, stdout=subprocess.DEVNULL)
    server = LiveServer(process, {"host": "127.0.0.1", "port": port}, Path(os.devnull))
    try:
        wait_for(lambda: _is_up(server), "the server to be up")
        for _ in range(3):
            assert server.complete("Hello", max_tokens=2).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_GUARD_S) == 0
    finally:
        process.kill()
        process.wait()
