"""Everything about HTTP that is not text: paths, methods, bodies, Content-Type, models, tokens, health."""

import asyncio
import gzip
import json

import pytest

from tests.fakes import FakeBackend
from tests.scheduler.serve.rig import MAX_LEN, chat_body, http_post, reply_of, until

BODY = json.dumps(chat_body(max_tokens=1)).encode()
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "application/x-www-form-urlencoded", "Application/JSON; charset=UTF-8", "nonsense"],
)
async def test_29_any_content_type_is_taken_if_the_body_is_json(server, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    assert (await server.request("POST", CHAT, BODY, headers)).status == 200


async def test_a_byte_order_mark_and_white_space_do_no_harm(server):
    assert (await server.post(CHAT, b"\xef\xbb\xbf \n" + BODY + b"\n")).status == 200


async def test_43_the_models_are_listed_by_name(serve):
    server = await serve(served_model_name=("a/b", "c"))
    listed = (await server.get("/v1/models")).json
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["a/b", "c"]
    for card in listed["data"]:
        assert card["object"] == "model"
        assert isinstance(card["created"], int)
        assert card["owned_by"]
        assert card["max_model_len"] == MAX_LEN
        assert (await server.get(f"/v1/models/{card['id']}")).json == card
    assert (await server.chat(model="c", max_tokens=1)).json["model"] == "c"
    assert (await server.chat(max_tokens=1)).json["model"] == "a/b"
    for unknown in ("nope", "%ff", "%ED%A0%80", "a%00b", "..%2f..", "\u00e9"):
        (await server.get(f"/v1/models/{unknown}")).refused(404)


async def test_a_star_accepts_any_model_name(serve):
    server = await serve(served_model_name=("*",))
    assert (await server.chat(model="gpt-4", max_tokens=1)).json["model"] == "gpt-4"
    assert (await server.get("/v1/models")).json["data"][0]["id"] == "fake"


async def test_43_what_is_not_there_or_not_allowed_says_so_in_the_envelope(server):
    (await server.get("/v1/nope")).refused(404)
    (await server.post("/", {})).refused(404)
    meant = (await server.post("/chat/completions/", {})).refused(404)["message"]
    assert meant.endswith("/chat/completions/, did you mean /v1/chat/completions?")
    assert "/docs" in (await server.get("/")).refused(404)["message"]
    for method, path, allowed in (
        ("DELETE", "/v1/models", "GET"),
        ("GET", CHAT, "POST"),
        ("PUT", "/health", "GET"),
        ("OPTIONS", "/tokenize", "POST"),
        ("PATCH", CHAT, "POST"),
    ):
        reply = await server.request(method, path)
        reply.refused(405)
        assert allowed in reply.headers["allow"]
    (await server.post("/v1/embeddings", {"input": "x"})).refused(501)


async def test_43_head_is_answered_without_a_body(server):
    for path in ("/health", "/v1/models", "/metrics"):
        reply = await server.request("HEAD", path)
        assert (reply.status, reply.body) == (200, b"")


async def test_43_while_the_model_loads_health_says_so_and_calls_wait_their_turn(serve):
    server = await serve(loading=True)
    for path in ("/health", "/v1/models", "/metrics", "/slots"):
        (await server.get(path)).refused(503)
    assert (await server.request("HEAD", "/health")).status == 503
    refused = await server.chat()
    refused.refused(503)
    assert int(refused.headers["retry-after"]) >= 1
    server.serving.service = server.service
    assert (await server.get("/health")).json == {"status": "ok"}
    assert (await server.chat(max_tokens=1)).status == 200


async def test_a_server_that_drains_takes_nothing_new_and_finishes_what_it_has(serve):
    server = await serve(FakeBackend(delay_s=0.005))
    running = asyncio.create_task(server.chat(max_tokens=20))
    await until(lambda: server.engine.num_running == 1)
    server.engine.drain()
    (await server.get("/health")).refused(503)
    for stream in (False, True):
        (await server.chat(stream=stream)).refused(503)
    assert (await running).json["usage"]["completion_tokens"] == 20


@pytest.mark.slow
async def test_health_answers_while_the_model_is_busy(serve):
    server = await serve(FakeBackend(delay_s=0.2))
    busy = asyncio.create_task(server.chat(max_tokens=2))
    await until(lambda: server.engine.num_running == 1)
    for _ in range(20):
        assert (await server.get("/health")).status == 200
    assert not busy.done()
    assert (await busy).status == 200


async def test_health_answers_while_a_prompt_is_tokenized(server, monkeypatch):
    started, release = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*_args, **_kwargs):
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return [72]

    monkeypatch.setattr(server.service.tokenizer, "encode", slow)
    waiting = asyncio.create_task(server.complete(max_tokens=1))
    await started.wait()
    assert (await server.get("/health")).status == 200
    assert not waiting.done()
    release.set()
    assert (await waiting).status == 200


async def test_tokens_of_a_text_and_of_a_conversation(server):
    text = (await server.post("/tokenize", {"prompt": "H\u00e9<|im_end|>"})).json
    assert text == {"tokens": [72, 195, 169, 257], "count": 4, "max_model_len": MAX_LEN}
    chat = (await server.post("/tokenize", {"model": "fake", **chat_body(), "return_token_strs": True})).json
    assert chat["count"] == len(chat["tokens"]) == 21
    assert chat["token_strs"][:2] == ["<|im_start|>", "u"]
    assert (await server.post("/tokenize", {"prompt": ""})).json["count"] == 0
    assert (await server.post("/tokenize", {"prompt": "a" * 5000})).json["count"] == 5000
    back = (await server.post("/detokenize", {"tokens": text["tokens"]})).json
    assert back["prompt"] == "H\u00e9<|im_end|>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", **chat_body()}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(server, path, body, param):
    (await server.post(path, body)).refused(param=param)


async def test_slots_show_state_and_counts_but_no_text(serve):
    server = await serve(FakeBackend(delay_s=0.01), n_slots=2)
    running = asyncio.create_task(server.chat("a secret question", max_tokens=30))
    await until(lambda: any(view.num_output for view in server.engine.slots()))
    reply = await server.get("/slots")
    busy, idle = reply.json
    assert busy["is_processing"]
    assert busy["state"] == "decoding"
    assert busy["num_output_tokens"] >= 1
    assert not idle["is_processing"]
    assert b"secret" not in reply.body
    await running


@pytest.mark.slow
async def test_slots_say_the_same_in_llama_servers_names(serve):
    server = await serve(FakeBackend(delay_s=0.01), n_slots=2)
    fields = {"max_tokens": 90, "temperature": 0.5, "seed": 7, "stop": ["a secret"], "ignore_eos": True}
    running = asyncio.create_task(server.chat("a secret question", **fields))
    await until(lambda: any(view.num_output for view in server.engine.slots()))
    reply = await server.get("/slots")
    busy, idle = reply.json
    assert (busy["id"], busy["id_task"], busy["n_ctx"], busy["speculative"]) == (0, 1, MAX_LEN, False)
    assert busy["n_prompt_tokens"] == busy["n_prompt_tokens_processed"] == busy["num_prompt_tokens"]
    assert busy["n_prompt_tokens_cache"] == 0
    (progress,) = busy["next_token"]
    assert progress == {
        "has_next_token": True,
        "n_decoded": busy["num_output_tokens"],
        "n_remain": 90 - busy["num_output_tokens"],
    }
    params = busy["params"]
    assert (params["seed"], params["temperature"], params["n_predict"], params["max_tokens"]) == (7, 0.5, 90, 90)
    assert (idle["id_task"], idle["n_ctx"], idle["n_prompt_tokens"]) == (-1, MAX_LEN, 0)
    assert not {"params", "next_token"} & idle.keys()
    assert b"secret" not in reply.body
    await running
    second = asyncio.create_task(server.chat("Hi", max_tokens=30, ignore_eos=True))
    await until(lambda: server.engine.num_running == 1)
    assert (await server.get("/slots")).json[0]["id_task"] == 2
    await second


async def test_slots_may_be_asked_whether_one_is_idle(serve):
    server = await serve(FakeBackend(delay_s=0.01), n_slots=1)
    assert (await server.get("/slots?fail_on_no_slot=1")).status == 200
    running = asyncio.create_task(server.complete(max_tokens=30, ignore_eos=True))
    await until(lambda: server.engine.num_running == 1)
    assert (await server.get("/slots")).status == 200
    reply = await server.get("/slots?fail_on_no_slot=1")
    assert reply.refused(503)["code"] == "unavailable"
    await running


async def test_the_version_is_told(server):
    assert (await server.get("/version")).json["version"].count(".") == 2


async def test_metrics_are_prometheus_text(server):
    await server.chat(max_tokens=3)
    reply = await server.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'vllm:generation_tokens_total{model_name="fake"} 3.0' in reply.body


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_over_large_body_is_refused_and_the_server_goes_on(serve, chunked):
    server = await serve(max_body=1000)
    exact = json.dumps({"prompt": "Hi", "max_tokens": 1, "user": ""}).encode()
    exact = exact.replace(b'"user": "', b'"user": "' + b"x" * (1000 - len(exact)))
    assert (await server.post("/v1/completions", exact)).status == 200
    if chunked:
        raw = http_post(CHAT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        raw += b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"
        raw += b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        first = (await server.raw(raw)).split(b"HTTP/1.1 ")[1]
        assert first.startswith(b"413")
    else:
        (await server.post(CHAT, b"x" * 1001)).refused(413)
    assert (await server.get("/health")).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x-nothing", "identity, GZip", "gzip\r\nX: y"])
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_packed_body_is_refused_unopened_and_its_connection_closed(server, encoding, path, caplog):
    for body in (gzip.compress(b" " * 1_000_000), b"garbage"):
        raw = await server.raw(http_post(path, body, f"Content-Encoding: {encoding}"))
        assert reply_of(raw).refused(415)["code"] == "encoding_not_supported"
    assert not caplog.records


async def test_a_body_packed_for_the_way_is_refused_too(server):
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n".encode()
    error = reply_of(await server.raw(head + chunks)).refused(415)
    assert error["code"] == "encoding_not_supported"
    assert "Transfer-Encoding: gzip" in error["message"]


async def test_a_packed_body_is_not_asked_for(server):
    head = http_post(CHAT, BODY, "Expect: 100-continue", "Content-Encoding: gzip").partition(b"\r\n\r\n")[0]
    reply = await server.first_reply(head + b"\r\n\r\n")
    reply.refused(415)
    assert reply.headers["connection"] == "close"


async def test_identity_is_no_packing(server):
    assert (await server.post(CHAT, BODY, {"Content-Encoding": "Identity"})).status == 200


async def test_after_a_body_too_large_nothing_more_is_answered(serve):
    server = await serve(max_body=1000)
    raw = await server.raw(http_post(CHAT, b"x" * 1001) + http_post(CHAT, BODY))
    assert raw.count(b"HTTP/1.1") == 1
    reply_of(raw).refused(413)


async def test_a_body_that_does_not_arrive_is_not_waited_for(serve):
    server = await serve(body_timeout=0.05)
    (await server.first_reply(http_post(CHAT, BODY)[:-5])).refused(408)


async def test_100_continue_is_said_only_to_a_body_that_will_be_read(serve):
    server = await serve(max_body=1000)
    raw = await server.raw(http_post(CHAT, BODY, "Expect: 100-continue", "Connection: close"))
    assert raw.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    large = http_post(CHAT, b"x" * 2000, "Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    (await server.first_reply(large)).refused(413)
    reply_of(await server.raw(http_post(CHAT, BODY, "Expect: a-miracle", "Connection: close"))).refused(417)


async def test_a_chunked_body_is_a_body(server):
    raw = http_post(CHAT, b"", "Connection: close").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(BODY[i : i + 7]), BODY[i : i + 7]) for i in range(0, len(BODY), 7))
    assert reply_of(await server.raw(raw + pieces + b"0\r\n\r\n")).status == 200


async def test_too_many_connections_are_told_so(serve):
    server = await serve(max_connections=2)
    held = [await asyncio.open_connection(server.host, server.port) for _ in range(2)]
    await asyncio.sleep(0.01)
    reply_of(await server.raw(b"")).refused(503)
    for _, writer in held:
        writer.close()
    await asyncio.sleep(0.05)
    assert (await server.get("/health")).status == 200
