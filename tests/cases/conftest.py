"""One server with the real model for all cases; after each, what was a fixed greedy answer must still be the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live_server import LiveServer, live_server

SLOTS = 4
CONTEXT = 256


@pytest.fixture(scope="session")
def shared_server(model_path: Path) -> Iterator[LiveServer]:
    """Small on purpose: four slots, a context of 256, a queue of sixteen."""
    options = ("--slots", str(SLOTS), "--context", str(CONTEXT), "--max-queue", "16", "--served-model-name", "smollm2")
    with live_server(model_path, *options) as server:
        yield server


@pytest.fixture(scope="session")
def greeting(shared_server: LiveServer) -> str:
    """What the model says to "Hi" before any case has run."""
    return shared_server.chat("Hi", temperature=0, max_tokens=8).json["choices"][0]["message"]["content"]


@pytest.fixture
def server(shared_server: LiveServer, greeting: str) -> Iterator[LiveServer]:
    """The shared server; when the case is over it must be alive, idle, and as it was."""
    yield shared_server
    assert shared_server.process.poll() is None
    reply = shared_server.chat("Hi", temperature=0, max_tokens=8)
    assert reply.json["choices"][0]["message"]["content"] == greeting
    shared_server.wait_until_idle()
