"""The server as a process: what it prints, how it ends, what it leaves behind."""

import json
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.live_server import HANG_GUARD_S, live_server, parse_sse, strict_json
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

REFERENCE = "--kernels", "reference"
"""The set that needs no compiling."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", max_context=4096)


def _command(model, *options):
    return [sys.executable, "-m", "clients.cli", "serve", str(model), "--port", "0", *REFERENCE, *options]


def _serve(model, *options):
    return live_server(model, *REFERENCE, *options)


def _refused(model, *options):
    """What a server that must not start prints on stderr; nothing on stdout."""
    result = subprocess.run(
        _command(model, *options), capture_output=True, text=True, timeout=HANG_GUARD_S, check=False
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def _last_line(stderr):
    return stderr.splitlines()[-1]


def _long_stream(server, max_tokens):
    """A stream that has begun."""
    body = {"prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
    connection = server.open_stream("/v1/completions", body)
    first = connection.recv(65536)
    assert b"200 OK" in first
    while b"data: " not in first:
        first += connection.recv(65536)
    return connection, first


def _rest(connection):
    data = b""
    with connection:
        while piece := connection.recv(65536):
            data += piece
    return data


def _body(response):
    """The body of a chunked response."""
    rest, body = response.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_stream_finish_and_then_the_process_ends_with_zero(model, number, tmp_path):
    path = tmp_path / "s"
    with _serve(model, "--unix-socket", str(path), "--grace", "100", "--log-format", "json") as server:
        assert path.is_socket()
        connection, first = _long_stream(server, 300)
        server.process.send_signal(number)
        stream = parse_sse(_body(first + _rest(connection)))
        assert stream.finish_reasons() == ["length"]
        assert server.process.wait(HANG_GUARD_S) == 0
        assert not path.exists()
        assert server.process.stdout.read() == "", "stdout has the ready line only"
        assert b'"running": 1' in server.log.read_bytes(), "the stream had ended before the signal came"


def test_without_grace_the_stream_ends_with_abort_and_the_process_with_zero(model):
    with _serve(model, "--grace", "0") as server:
        connection, first = _long_stream(server, 4000)
        server.process.send_signal(signal.SIGTERM)
        assert parse_sse(_body(first + _rest(connection))).finish_reasons() == ["abort"]
        assert server.process.wait(HANG_GUARD_S) == 0


def test_a_second_signal_ends_the_process_at_once_and_removes_the_socket_file(model, tmp_path):
    path = tmp_path / "s"
    with _serve(model, "--unix-socket", str(path), "--grace", "1000") as server:
        connection, _ = _long_stream(server, 4000)
        server.process.send_signal(signal.SIGTERM)
        while server.get("/health").status != 503:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANG_GUARD_S) == 128 + signal.SIGTERM
        assert not path.exists()
        connection.close()


def test_sigkill_leaves_nothing_that_stops_the_next_start(model, tmp_path):
    path = tmp_path / "s"
    with _serve(model, "--unix-socket", str(path)) as server:
        port = server.port
        connection, _ = _long_stream(server, 4000)
        server.process.kill()
        server.process.wait(HANG_GUARD_S)
        connection.close()
    assert path.is_socket()
    with _serve(model, "--unix-socket", str(path), "--port", str(port)) as server:
        assert server.port == port
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b'{"op":"generate","id":1,"prompt":"Hello","max_tokens":1}\n')
            assert json.loads(client.makefile().readline())["event"] == "started"


def test_a_port_or_socket_in_use_is_one_line_and_exit_code_one(model, tmp_path):
    path = tmp_path / "s"
    with _serve(model, "--unix-socket", str(path)) as server:
        line = _last_line(_refused(model, "--port", str(server.port)))
        why = "address already in use; choose another with --port or LOCKSTEP_PORT"
        assert line == f"Error: cannot listen on 127.0.0.1:{server.port}: {why}"
        line = _last_line(_refused(model, "--unix-socket", str(path)))
        assert line == f"Error: cannot listen on {path}: another server listens there"
        assert server.get("/health").status == 200


def test_a_bad_model_file_is_one_line_with_its_name_and_exit_code_one(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"<html>not found</html>")
    stderr = _refused(path)
    assert _last_line(stderr).startswith(f"Error: {path}: ")


def test_a_bad_certificate_or_file_of_keys_is_one_line_and_exit_code_one(model, tmp_path):
    (tmp_path / "empty").touch()
    for option in ("--ssl-cert", "--api-key-file"):
        line = _last_line(_refused(model, option, str(tmp_path / "empty")))
        assert line.startswith(f"Error: {option} {tmp_path / 'empty'}: ")


def test_the_log_says_in_words_where_it_serves_and_how_it_ends(model):
    with _serve(model) as server:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(HANG_GUARD_S)
        log, url = server.log.read_text(), f"http://127.0.0.1:{server.port}"
    assert f" at {url} (docs at {url}/docs); Ctrl-C stops" in log
    assert "packing weights 100 %" in log
    assert "stopping; a second signal ends at once" in log
    assert "stopped" in log.splitlines()[-1]


def test_json_logs_are_one_strict_json_object_a_line(model):
    with _serve(model, "--log-format", "json") as server:
        server.complete("Hello", max_tokens=2, ignore_eos=True)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(HANG_GUARD_S)
        lines = [strict_json(line) for line in server.log.read_bytes().splitlines()]
    assert [line["reason"] for line in lines if line["event"] == "request"] == ["length"]


def test_a_cache_for_many_slots_is_not_paid_for_at_the_start(model):
    options = "--slots", "32", "--kv-dtype", "float32"
    with _serve(model, "--slots", "1") as server:
        small = psutil.Process(server.process.pid).memory_info().rss
    with _serve(model, *options, "--log-format", "json") as server:
        large = psutil.Process(server.process.pid).memory_info().rss
        loaded = [json.loads(line) for line in server.log.read_bytes().splitlines() if b'"loaded"' in line]
    assert loaded[0]["kv_cache_mib_at_most"] == 64
    assert large - small < 32 * 2**20


def test_every_connection_allowed_has_a_file_to_be(model):
    command = ["sh", "-c", 'ulimit -S -n 64; exec "$@"', "sh", *_command(model)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdout.readline()
        allowed, possible = psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)
        process.terminate()
    assert allowed == min(256 + 2 * 1024, possible)
