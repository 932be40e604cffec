"""SIGKILL at any moment leaves no process behind, and nothing that stops the next start."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from tests.live_server import HANG_GUARD_S, live_server, wait_for
from tests.tiny_model import CHATML, write_tiny_llama

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


def _gone(processes):
    wait_for(lambda: not any(process.is_running() for process in processes), "the server's processes to end")


def test_while_it_loads_and_compiles(model, tmp_path):
    path, env = tmp_path / "s", {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    options = ("--unix-socket", str(path), "--kernels", "compiled")

    def has_compiled(n_files):
        return len(list(tmp_path.glob("lockstep/kernels/*/*"))) >= n_files

    for is_moment in (path.is_socket, lambda: has_compiled(1), lambda: has_compiled(3)):
        command = [sys.executable, "-m", "clients.cli", "serve", str(model), "--port", "0", *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as process:
            wait_for(is_moment, "the moment to kill")
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
            process.kill()
            process.wait(HANG_GUARD_S)
            _gone(family)
    texts = []
    for kernels in (tmp_path, tmp_path / "elsewhere"):
        with live_server(model, *options, env={**env, "XDG_CACHE_HOME": str(kernels)}) as server:
            texts.append(server.complete("Hello", max_tokens=8, temperature=0).json["choices"][0]["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("template", [CHATML, ENDLESS], ids=["idle", "rendering"])
def test_the_process_that_renders_does_not_outlive_the_server(tmp_path, template):
    model = write_tiny_llama(tmp_path / "tiny.gguf", chat_template=template)
    with live_server(model, "--kernels", "reference") as server:
        (renderer,) = psutil.Process(server.process.pid).children()

        def chat():
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                server.chat("Hi", max_tokens=1)

        chatting = threading.Thread(target=chat)
        if template == ENDLESS:
            chatting.start()
            wait_for(lambda: sum(renderer.cpu_times()[:2]) > 0.5, "the template to run")
        server.process.send_signal(signal.SIGKILL)
        _gone([renderer])
        if chatting.ident:
            chatting.join()
