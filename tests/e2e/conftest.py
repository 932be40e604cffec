"""One `lockstep serve` with the default model for all tests of real clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.pull import DEFAULT_MODEL
from tests.live_server import LiveServer, live_server

SLOTS = 4
"""Fewer than the clients of a test, so that some wait."""


@pytest.fixture(scope="session")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serves HTTP and the JSON socket, over TCP and as a Unix socket."""
    unix_socket = tmp_path_factory.mktemp("run") / "lockstep.sock"
    sockets = ("--jsonl-port", "0", "--unix-socket", str(unix_socket))
    with live_server(model_path, "--slots", str(SLOTS), "--served-model-name", DEFAULT_MODEL, *sockets) as server:
        yield server
