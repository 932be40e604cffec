"""Two replicas behind `vllm-router`: the same text whichever answers, both used, one of them lost without a word."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live_server import LiveServer, live_server, wait_for
from tests.real_clients.conftest import MODEL, SLOTS

ROUTER = Path(os.environ["CLIENTS"]) / "vllm-router" / "bin" / "vllm-router"
QUESTIONS = [f"Write about {topic}." for topic in ("the sea", "a cat", "bread", "the moon", "trains", "winter")]
BRIEF = {"model": MODEL, "temperature": 0, "max_tokens": 6}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def router(replicas: list[LiveServer], log: Path, policy: str) -> Iterator[LiveServer]:
    port, metrics_port = free_port(), free_port()
    command = [ROUTER, "--port", port, "--policy", policy, "--worker-urls", *[replica.url for replica in replicas]]
    command += ["--prometheus-port", metrics_port, "--worker-startup-check-interval", 1]
    command += ["--health-check-interval-secs", 1, "--health-failure-threshold", 1]
    with log.open("w") as output, subprocess.Popen(map(str, command), stdout=output, stderr=output) as process:
        try:
            front = LiveServer(process, {"host": "127.0.0.1", "port": port}, log)
            wait_for(lambda: answers(front), f"the router: {log}")
            yield front
        finally:
            process.kill()


def answers(server: LiveServer) -> bool:
    try:
        return server.get("/readiness").status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[LiveServer]]:
    with live_server(MODEL, *SLOTS) as one, live_server(MODEL, *SLOTS) as two:
        yield [one, two]


def text(server: LiveServer, question: str) -> str:
    return server.chat(question, **BRIEF).json["choices"][0]["message"]["content"]


def streamed(server: LiveServer, question: str) -> str:
    return server.stream_chat(question, **BRIEF).text()


def served(replica: LiveServer) -> float:
    return replica.metric("vllm:request_success_total")


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware", "power_of_two"])
def test_the_text_is_unchanged_and_both_replicas_are_used(replicas, tmp_path, policy):
    alone = [text(replicas[0], question) for question in QUESTIONS]
    before = [served(replica) for replica in replicas]
    with router(replicas, tmp_path / "router.log", policy) as front, ThreadPoolExecutor(len(QUESTIONS)) as pool:
        assert list(pool.map(lambda question: text(front, question), QUESTIONS)) == alone
        assert list(pool.map(lambda question: streamed(front, question), QUESTIONS)) == alone
    each = [served(replica) - count for replica, count in zip(replicas, before, strict=True)]
    assert sum(each) == 2 * len(QUESTIONS)
    if policy == "round_robin":  # the others may have their reasons to prefer one
        assert each[0] == each[1]


def test_what_the_router_asks_and_passes_on_is_answered(replicas, tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    with router(replicas, tmp_path / "router.log", "round_robin") as front:
        assert front.get("/health").status == 200
        assert [model["id"] for model in front.get("/v1/models").json["data"]] == [MODEL]
        assert b"vllm:num_requests_running" in front.get("/metrics").body
        loads = front.get("/get_loads").json["workers"]
        assert {each["worker"]: each["load"] for each in loads} == {replica.url: 0 for replica in replicas}
        asked = {"model": MODEL, "messages": messages}
        tokens = front.post("/tokenize", asked).json
        assert tokens == replicas[0].post("/tokenize", asked).json
        assert tokens["count"] == 31
        assert front.chat(messages, **BRIEF | {"temperature": -1}).refused(400, "temperature")
        assert front.chat(messages, **BRIEF | {"model": "gpt-7"}).refused(404)
        usage = front.stream_chat(messages, **BRIEF, stream_options={"include_usage": True}).usage
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (31, 6)


def test_an_answer_broken_off_before_the_router_ends_behind_it(replicas, tmp_path):
    with router(replicas, tmp_path / "router.log", "round_robin") as front:
        connection = front.open_stream("/v1/completions", {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True})
        assert connection.recv(1)
        connection.close()
        for replica in replicas:
            replica.wait_until_idle()


def test_a_killed_replica_is_survived(replicas, tmp_path):
    alone = [text(replicas[0], question) for question in QUESTIONS]
    with live_server(MODEL, *SLOTS) as doomed, router([replicas[0], doomed], tmp_path / "log", "round_robin") as front:
        assert [text(front, question) for question in QUESTIONS] == alone
        assert served(doomed) == len(QUESTIONS) / 2
        doomed.process.kill()
        doomed.process.wait()
        assert [text(front, question) for question in QUESTIONS] == alone
        assert [streamed(front, question) for question in QUESTIONS] == alone
