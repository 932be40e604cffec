"""One `lockstep serve` with the default model for the clients of one environment.

The tests run by the interpreter of a client's own environment, the server by that of SERVER_PYTHON.
"""

import os
from collections.abc import Iterator

import pytest

from tests.live_server import LiveServer, live_server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or litellm asks the network for the price of its models

MODEL = "smollm2-135m"
SLOTS = ("--slots", "4", "--context", "1024")


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server(MODEL, *SLOTS) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(server: LiveServer) -> str:
    """What a user writes into a client's settings."""
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def hello(server: LiveServer) -> str:
    """The answer to `Hi` in at most 6 tokens at temperature 0, as a bare HTTP call gets it."""
    text = server.chat("Hi", max_tokens=6, temperature=0).json["choices"][0]["message"]["content"]
    assert text
    return text


@pytest.fixture
def ends_early(server: LiveServer) -> Iterator[None]:
    """Whoever breaks off an answer in this test is noticed: it ends as aborted, and its slot is free again."""
    before = aborted(server)
    yield
    server.wait_until_idle()
    assert aborted(server) == before + 1


def aborted(server: LiveServer) -> float:
    lines = server.get("/metrics").body.decode().splitlines()
    counts = [line for line in lines if line.startswith("vllm:request_success_total{") and 'reason="abort"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts)
