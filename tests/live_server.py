"""A real `lockstep serve` in a process of its own, and a strict client that trusts nothing it is sent."""

import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

HANG_GUARD_S = 120.0
PYTHON = os.environ.get("SERVER_PYTHON", sys.executable)
"""Runs the server: the tests of other people's clients run in environments that have no server."""


def _no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def strict_json(body: bytes) -> Any:
    """`body` as strict UTF-8 and strict JSON: no NaN, no infinities."""
    return json.loads(body.decode("utf-8", errors="strict"), parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.body)

    def refused(self, status: int = 400, param: str | None = None) -> dict[str, Any]:
        """The error object, having checked that this is a clean refusal in OpenAI's envelope."""
        assert self.status == status, (self.status, self.body)
        assert self.headers["content-type"].split(";")[0] == "application/json"
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        for leak in ("Traceback", "Error:", "Exception", "msgspec", 'File "'):
            assert leak not in error["message"], error
        if param is not None:
            assert error["param"] == param, error
        return error


@dataclass(frozen=True, slots=True)
class Stream:
    """A finished SSE stream, its framing already checked: `chunks` are the JSON events before the one `[DONE]`."""

    chunks: list[dict[str, Any]]
    comments: list[str]

    def text(self, index: int = 0) -> str:
        return "".join(self.deltas(index))

    def deltas(self, index: int = 0) -> list[str]:
        pieces = []
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["index"] == index:
                    piece = choice["text"] if "text" in choice else choice["delta"].get("content")
                    if piece:
                        pieces.append(piece)
        return pieces

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [
            choice["finish_reason"]
            for chunk in self.chunks
            for choice in chunk["choices"]
            if choice["index"] == index and choice["finish_reason"] is not None
        ]

    @property
    def usage(self) -> dict[str, Any] | None:
        usages = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return usages[-1] if usages else None


def parse_sse(body: bytes, *, has_done: bool = True) -> Stream:
    """The events of a whole SSE body: `data: {json}` and blank lines, comments, one `[DONE]`, nothing after it.

    llama-server's own form has none: `has_done` says whether there must be one.
    """
    text = body.decode("utf-8", errors="strict")
    assert text.endswith("\n\n"), text[-100:]
    chunks, comments, done = [], [], 0
    for event in text[:-2].split("\n\n"):
        assert not done, f"after [DONE]: {event!r}"
        if event.startswith(":"):
            comments.append(event)
            continue
        assert event.startswith("data: "), event
        assert "\n" not in event
        payload = event.removeprefix("data: ")
        if payload == "[DONE]":
            done += 1
        else:
            chunks.append(json.loads(payload, parse_constant=_no_constant))
    assert done == has_done
    return Stream(chunks, comments)


class LiveServer:
    """The server's address and its process."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any], log: Path) -> None:
        self.process = process
        self.ready = ready
        self.host = ready["host"]
        self.port = int(ready["port"])
        self.log = log

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def request(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=HANG_GUARD_S)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw, {"Content-Type": "application/json", **headers})

    def chat(self, content: str | Sequence[dict[str, Any]] = "Hi", **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", self._chat(content, fields))

    def complete(self, prompt: Any, **fields: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def stream_chat(self, content: str | Sequence[dict[str, Any]] = "Hi", **fields: Any) -> Stream:
        return self.stream("/v1/chat/completions", self._chat(content, fields))

    def stream_completion(self, prompt: Any, **fields: Any) -> Stream:
        return self.stream("/v1/completions", {"prompt": prompt, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        reply = self.post(path, {**body, "stream": True})
        assert reply.status == 200, (reply.status, reply.body)
        assert reply.headers["content-type"].split(";")[0] == "text/event-stream"
        return parse_sse(reply.body)

    @staticmethod
    def _chat(content: str | Sequence[dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return {"messages": messages, **fields}

    def open_stream(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a streamed request has been sent and nothing read yet."""
        raw = json.dumps({**body, "stream": True}).encode()
        connection = socket.create_connection((self.host, self.port), timeout=HANG_GUARD_S)
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        return connection

    def metric(self, name: str) -> float:
        """The sum over labels of one sample in /metrics."""
        lines = self.get("/metrics").body.decode().splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_until_idle(self) -> None:
        """Return once nothing runs and nothing waits."""
        wait_for(
            lambda: self.metric("vllm:num_requests_running") == 0 and self.metric("vllm:num_requests_waiting") == 0,
            "the server to be idle",
        )


def reset(connection: socket.socket) -> None:
    """Close with RST, as a client that crashed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def wait_for(condition: Any, what: str) -> None:
    """Poll until `condition()` holds; the hang guard is generous, since the machine may be busy."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def live_server(model: str | Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[LiveServer]:
    """Start `lockstep serve MODEL *options` on a free port, yield it when it is ready, stop it by SIGTERM."""
    command = [PYTHON, "-m", "clients.cli", "serve", str(model), "--port", "0", *options]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        watchdog = threading.Timer(HANG_GUARD_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
            watchdog.cancel()
            assert line, f"the server did not start:\n{Path(log.name).read_text()}"
            yield LiveServer(process, json.loads(line), Path(log.name))
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(HANG_GUARD_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
