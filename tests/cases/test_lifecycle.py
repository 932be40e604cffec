"""Clients that come, go, crowd and fail: slots come back, streams go on, answers stay the same."""

import concurrent.futures
import io
import json
import socket
import time

import psutil
import pytest

from tests.cases.conftest import SLOTS
from tests.live_server import LiveServer, live_server, parse_sse, reset, wait_for

STORY = {"prompt": "Once upon a time", "temperature": 0, "seed": 0, "max_tokens": 200, "ignore_eos": True}
SHORT = {"temperature": 0, "seed": 0, "max_tokens": 8}


def read_events(connection: socket.socket, count: int) -> None:
    seen = b""
    while seen.count(b"data: ") < count:
        piece = connection.recv(65536)
        assert piece
        seen += piece


def next_text(lines: io.BufferedReader) -> str | None:
    """The text of the next event on a streamed completion, None once it is `[DONE]`."""
    while True:
        line = lines.readline()
        assert line, "the stream ended without [DONE]"
        if line == b"data: [DONE]\n":
            return None
        if line.startswith(b"data: "):
            return "".join(choice["text"] for choice in json.loads(line.removeprefix(b"data: "))["choices"])


def test_31_streams_cut_off_by_their_clients_leave_nothing_behind(server: LiveServer):
    process = psutil.Process(server.process.pid)

    def round_of_broken_streams() -> None:
        connections = [server.open_stream("/v1/completions", STORY) for _ in range(SLOTS)]
        for connection in connections:
            read_events(connection, 2)
        for connection in connections:
            reset(connection)
        server.wait_until_idle()

    for _ in range(3):
        round_of_broken_streams()
    fds, memory = process.num_fds(), process.memory_info().rss
    for _ in range(197):
        round_of_broken_streams()
    wait_for(lambda: process.num_fds() <= fds, "descriptors to be closed")
    assert process.memory_info().rss < memory + 50e6


def test_33_running_streams_go_on_while_a_long_prompt_is_prefilled(model_path):
    with live_server(model_path, "--slots", "2", "--context", "2048", "--prefill-chunk", "64") as server:
        solo = server.stream_completion(**STORY).text()
        long = {"prompt": [19556, 198] * 500, "temperature": 0, "seed": 0, "max_tokens": 1}
        solo_long = server.complete(**long).json["choices"]
        with server.open_stream("/v1/completions", STORY) as connection, connection.makefile("rb") as lines:
            seen = [next_text(lines) for _ in range(20)]
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                answer = pool.submit(server.complete, **long)
                while not answer.done():
                    seen.append(next_text(lines))
                num_during = len(seen) - 20
            assert answer.result().json["choices"] == solo_long
            while (text := next_text(lines)) is not None:
                seen.append(text)
        assert num_during >= len(long["prompt"]) // 64
        assert "".join(seen) == solo


def test_37_a_prompt_repeated_continued_or_changed_gets_its_cold_answer(server: LiveServer, model_path):
    first = [19556, 198, 504, 3575, 282, 4649, 314]
    own_output = server.complete(first, temperature=0, max_tokens=8, return_token_ids=True).json
    prompts = [first, first, first, first[:4], first + own_output["choices"][0]["token_ids"], [42, *first[1:]]]
    warm = [server.complete(prompt, temperature=0, max_tokens=8).json for prompt in prompts]
    with live_server(model_path, "--slots", str(SLOTS), "--context", "256") as cold_server:
        cold = [cold_server.complete(prompt, temperature=0, max_tokens=8).json for prompt in reversed(prompts)][::-1]
    for prompt, a, b in zip(prompts, warm, cold, strict=True):
        assert a["choices"][0]["text"] == b["choices"][0]["text"] != ""
        assert a["usage"]["prompt_tokens"] == len(prompt)


def test_s05_the_queue_is_bounded_and_says_when_to_come_back(server: LiveServer):
    connections = [server.open_stream("/v1/completions", STORY) for _ in range(SLOTS + 16)]
    try:
        wait_for(lambda: server.metric("vllm:num_requests_waiting") == 16, "the queue to fill")
        for stream in (False, True):
            reply = server.complete("Hi", max_tokens=1, stream=stream)
            reply.refused(429)
            assert int(reply.headers["retry-after"]) >= 1
    finally:
        for connection in connections:
            reset(connection)


def test_s13_counters_agree_after_aborted_streams(server: LiveServer):
    name = "vllm:request_success_total"
    before = server.metric(name)
    for _ in range(5):
        connection = server.open_stream("/v1/completions", STORY)
        read_events(connection, 2)
        reset(connection)
    server.wait_until_idle()
    assert server.metric(name) == before + 5
    text = server.get("/metrics").body.decode()
    assert "request_id" not in text
    assert "nan" not in text.lower()


def test_41_a_browser_can_ask_first_and_reads_why_it_was_refused(model_path):
    with live_server(model_path, "--api-key", "secret", "--cors-origin", "http://app.example") as server:
        origin = {"Origin": "http://app.example"}
        ask = {**origin, "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
        preflight = server.request("OPTIONS", "/v1/chat/completions", headers=ask)
        assert preflight.status in {200, 204}
        assert preflight.headers["access-control-allow-origin"] == "http://app.example"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        refused = server.post("/v1/chat/completions", body, origin)
        refused.refused(401)
        assert refused.headers["access-control-allow-origin"] == "http://app.example"
        assert server.post("/v1/chat/completions", body, {**origin, "Authorization": "Bearer secret"}).status == 200
        assert server.post("/v1/chat/completions", body, {"Authorization": "Bearer s\u00e9cret"}).status == 401
        assert server.get("/health").status == 200
        foreign = {"Origin": "http://evil.example", "Authorization": "Bearer secret"}
        server.post("/v1/chat/completions", body, foreign).refused(403)
        assert b"secret" not in server.log.read_bytes()


def test_43_models_health_and_unknown_paths_answer_as_clients_expect(server: LiveServer):
    models = server.get("/v1/models").json
    assert models["object"] == "list"
    (model,) = models["data"]
    assert model["object"] == "model"
    assert isinstance(model["created"], int)
    assert model["owned_by"]
    assert server.get(f"/v1/models/{model['id']}").json["id"] == model["id"]
    server.get("/v1/models/nope").refused(404)
    server.post("/v1/chat/completions", {"model": "nope", "messages": [{"role": "user", "content": "Hi"}]}).refused(404)
    head = server.request("HEAD", "/health")
    assert (head.status, head.body) == (200, b"")
    wrong = server.request("DELETE", "/v1/models")
    wrong.refused(405)
    assert "GET" in wrong.headers["allow"]
    server.get("/v1/nope").refused(404)
    assert server.get("/metrics").status == 200


def test_eight_clients_at_once_get_what_each_would_have_got_alone(server: LiveServer):
    jobs = [
        {"content": content, "max_tokens": 24, "temperature": temperature, "seed": seed, "top_p": 0.9}
        for seed, (content, temperature) in enumerate(
            [("Name a color.", 0), ("Name a fruit.", 0.7), ("Write a haiku.", 1.2), ("Count to ten.", 1.0)] * 2
        )
    ]
    alone = [server.chat(**job).json["choices"][0]["message"]["content"] for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda job: server.stream_chat(**job).text(), jobs))
    assert streams == alone


def test_a_slow_reader_holds_back_only_itself(server: LiveServer):
    slow = server.open_stream("/v1/completions", STORY)
    expected = server.complete("Hi", **SHORT).json["choices"]
    assert server.complete("Hi", **SHORT).json["choices"] == expected
    body = b""
    while True:
        piece = slow.recv(512)
        if not piece or b"[DONE]" in body:
            break
        body += piece
        time.sleep(0.001)
        if body.endswith(b"0\r\n\r\n"):
            break
    slow.close()
    assert b"data: [DONE]" in body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_waiting_in_the_queue_is_forgotten(server: LiveServer, stream):
    running = [server.open_stream("/v1/completions", STORY) for _ in range(SLOTS)]
    wait_for(lambda: server.metric("vllm:num_requests_running") == SLOTS, "the slots to fill")
    raw = json.dumps({**STORY, "stream": stream}).encode()
    waiting = socket.create_connection((server.host, server.port))
    waiting.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
    )
    wait_for(lambda: server.metric("vllm:num_requests_waiting") == 1, "the request to queue")
    waiting.close()
    wait_for(lambda: server.metric("vllm:num_requests_waiting") == 0, "the queue to forget it")
    for connection in running:
        reset(connection)


def test_parse_sse_refuses_what_follows_done():
    with pytest.raises(AssertionError):
        parse_sse(b"data: [DONE]\n\ndata: {}\n\n")
