"""llama-server's own endpoints and spellings."""

import asyncio

import pytest

from tests.fakes import FakeBackend
from tests.scheduler.serve.rig import MAX_LEN, streamed, until
from tests.scheduler.serve.test_completions import alphabet

GREEDY = {"temperature": 0, "n_predict": 6}


async def completion(server, prompt="Hello", **fields):
    return (await server.post("/completion", {"prompt": prompt, **fields})).json


async def stream(server, prompt="Hello", **fields):
    reply = await server.post("/completion", {"prompt": prompt, "stream": True, **fields})
    return streamed(reply, has_done=False).chunks


async def test_a_completion_in_llama_servers_form(server):
    answer = await completion(server, **GREEDY)
    text = (await server.complete("Hello", temperature=0, max_tokens=6)).json["choices"][0]["text"]
    assert (answer["content"], answer["stop"], answer["stop_type"]) == (text, True, "limit")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (6, 5)
    assert (answer["prompt"], answer["tokens"], answer["truncated"], answer["stopping_word"]) == (
        "Hello",
        [],
        False,
        "",
    )
    assert answer["system_fingerprint"] == "fp_fake"
    timings = answer["timings"]
    assert (timings["predicted_n"], timings["prompt_n"], timings["cache_n"]) == (6, 5, 0)
    for phase, count in (("prompt", 5), ("predicted", 6)):
        assert timings[f"{phase}_per_token_ms"] == pytest.approx(timings[f"{phase}_ms"] / count, abs=0.001)
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["n_ctx"]) == (6, 0, MAX_LEN)


async def test_llama_servers_defaults_hold_on_its_own_path(server):
    settings = (await completion(server, n_predict=1))["generation_settings"]
    expected = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_last_n": 64, "repeat_penalty": 1}
    assert {name: settings[name] for name in expected} == expected
    props = (await server.get("/props")).json["default_generation_settings"]
    own = {"n_ctx", "stop", "stream"}
    assert props["params"] == {k: v for k, v in settings.items() if k not in own} | {
        "seed": -1,
        "max_tokens": -1,
        "n_predict": -1,
    }


async def test_the_reported_seed_gives_the_same_answer_again(server):
    first = await completion(server, n_predict=8, temperature=1.0, seed=-1)
    seed = first["generation_settings"]["seed"]
    assert seed >= 0
    assert (await completion(server, n_predict=8, temperature=1.0, seed=seed))["content"] == first["content"]
    assert (await completion(server, n_predict=8, temperature=1.0))["generation_settings"]["seed"] != seed


@pytest.mark.parametrize("prompt", ["Hello", list(b"Hello")])
async def test_a_stream_says_the_same_without_done(server, prompt):
    plain = await completion(server, prompt, return_tokens=True, **GREEDY)
    *chunks, last = await stream(server, prompt, **GREEDY)
    assert "".join(chunk["content"] for chunk in chunks) == plain["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == plain["tokens"]
    assert not any(chunk["stop"] for chunk in chunks)
    assert [chunk["tokens_predicted"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    vary = {"id", "timings", "metrics", "content", "tokens", "generation_settings"}
    assert {k: v for k, v in last.items() if k not in vary} == {k: v for k, v in plain.items() if k not in vary}


@pytest.mark.parametrize(
    ("fields", "stop_type", "word", "content"),
    [
        ({"stop": ["cd"]}, "word", "cd", "ab"),
        ({"stop_token_ids": [ord("c")]}, "word", "c", "ab"),
        ({"n_predict": 2}, "limit", "", "ab"),
    ],
)
async def test_why_it_stopped(serve, fields, stop_type, word, content):
    server = await serve(FakeBackend(next_token=alphabet))
    answer = await completion(server, **{"n_predict": 9, **fields})
    assert (answer["stop_type"], answer["stopping_word"], answer["content"]) == (stop_type, word, content)


async def test_an_end_of_text_token_and_a_new_line_are_told_of(serve):
    server = await serve(FakeBackend(next_token=lambda row, *_: [10, 257][len(row) - 5]))
    answer = await completion(server)
    assert (answer["stop_type"], answer["content"], answer["has_new_line"]) == ("eos", "\n", True)
    assert answer["tokens_predicted"] == 2


async def test_truncated_says_that_the_context_was_full(server):
    prompt = [65] * (MAX_LEN - 3)
    assert (await completion(server, prompt))["truncated"] is True
    assert (await completion(server, prompt, n_predict=50))["truncated"] is True
    assert (await completion(server, prompt, n_predict=3))["truncated"] is False


async def test_probabilities_come_with_n_probs(serve):
    server = await serve(FakeBackend(next_token=alphabet))
    answer = await completion(server, n_predict=2, n_probs=2)
    first = answer["completion_probabilities"][0]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (97, "a", [97], -0.5)
    assert [rival["token"] for rival in first["top_logprobs"]] == ["a", "b"]
    chunks = await stream(server, n_predict=2, n_probs=2)
    assert [p for c in chunks for p in c.get("completion_probabilities", [])] == answer["completion_probabilities"]
    assert "completion_probabilities" not in await completion(server, n_predict=1, n_probs=0)


async def test_logit_bias_may_be_pairs_of_ids_or_texts(server, monkeypatch):
    seen = []
    submit = server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda request: seen.append(request.params) or submit(request))
    for given, expected in (
        ([[65, 1.5], [66, False]], {65: 1.5, 66: -100.0}),
        ([["ab", -1]], {97: -1, 98: -1}),
        ({"65": 2, "c": 1}, {65: 2, 99: 1}),
        ([], {}),
        (None, {}),
    ):
        await completion(server, n_predict=1, logit_bias=given)
        assert dict(seen.pop().logit_bias) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", ["a", "b"]),
        ("prompt", {"prompt_string": "x"}),
        ("prompt", [258]),
        ("n_predict", -2),
        ("n_probs", 21),
        ("n_probs", -1),
        ("n", 2),
        ("logit_bias", 7),
        ("logit_bias", [1]),
        ("logit_bias", [[1]]),
        ("logit_bias", [[1, True]]),
        ("logit_bias", [[1, "x"]]),
        ("logit_bias", [[1.5, 1]]),
        ("logit_bias", {"9" * 30: 1, "a": None}),
        ("logit_bias", [[258, 1]]),
        ("logit_bias", [[1, 101]]),
        ("logit_bias", [[1, 101], [1, 1]]),
        ("logit_bias", [["", 1]]),
        ("logit_bias", [[1, 1]] * 1025),
        ("prompt_logprobs", 1),
        ("temperature", -1),
        ("mirostat", 1),
        ("grammar", "root ::= [a]"),
        ("json_schema", {}),
        ("lora", [{"id": 0}]),
        ("image_data", [{}]),
        ("samplers", ["top_k"]),
        ("response_fields", ["content"]),
        ("id_slot", 2),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_a_completion_cannot_have_is_refused_by_name(server, field, value, is_streamed):
    reply = await server.post("/completion", {"prompt": "Hi", "stream": is_streamed, field: value})
    reply.refused(400, field)


async def test_stream_options_have_no_place_in_llama_servers_stream(server):
    body = {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}}
    (await server.post("/completion", body)).refused(400, "stream_options")


async def test_a_failure_is_an_error_whole_and_the_last_event_streamed(serve):
    def fault(work):
        if len(work.sequence.output_ids) == 2:
            raise RuntimeError("secret")

    server = await serve(FakeBackend(fault=fault))
    (await server.post("/completion", {"prompt": "Hi"})).refused(500)
    *chunks, last = await stream(server)
    assert [len(chunk["tokens"]) for chunk in chunks] == [1, 1]
    assert last["error"]["type"] == "server_error"


async def test_a_client_that_goes_away_ends_its_completion(serve):
    server = await serve(FakeBackend(delay_s=0.005))
    _, writer = await server.open("/completion", {"prompt": "Hi", "stream": True})
    await until(lambda: server.engine.num_running == 1)
    writer.close()
    await server.idle()
    assert server.service.calls == {}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
async def test_its_spellings_are_aliases_everywhere(server, monkeypatch, path):
    seen = []
    submit = server.engine.submit
    monkeypatch.setattr(server.engine, "submit", lambda request: seen.append(request.params) or submit(request))
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    await server.post(path, {**body, "n_predict": 3, "repeat_penalty": 1.5, "repeat_last_n": 7, "typical_p": 0.5})
    params = seen.pop()
    assert (params.max_tokens, params.repetition_penalty, params.repeat_last_n, params.typical_p) == (3, 1.5, 7, 0.5)
    await server.post(
        path, {**body, "n_predict": 9, "max_tokens": 2, "repeat_penalty": 1.5, "repetition_penalty": 1.25}
    )
    assert (seen[0].max_tokens, seen[0].repetition_penalty) == (2, 1.25)
    await server.post(path, {**body, "n_predict": -1})
    assert seen[1].max_tokens is None
    assert seen[1].repetition_penalty == 1


async def test_an_n_predict_of_zero_scores_a_completion_and_is_refused_by_name_in_a_chat(server):
    assert (await server.complete(n_predict=0)).json["usage"]["completion_tokens"] == 0
    assert (await completion(server, n_predict=0))["tokens_predicted"] == 0
    (await server.chat(n_predict=0)).refused(400, "n_predict")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
async def test_progress_is_told_before_the_first_token_if_asked_for(server, path):
    text = "0123456789"
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 3, "stream": True}
    reply = await server.post(path, {**body, "return_progress": True})
    chunks = streamed(reply, has_done=path != "/completion").chunks
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    total = told[-1]["total"]
    assert [progress["processed"] for progress in told] == [*range(8, total, 8), total]
    assert {progress["total"] for progress in told} == {total}
    assert {progress["cache"] for progress in told} == {0}
    assert [progress["time_ms"] for progress in told] == sorted(progress["time_ms"] for progress in told)
    assert all("prompt_progress" in chunk for chunk in chunks[: len(told)])
    silent = streamed(await server.post(path, body), has_done=path != "/completion").chunks
    assert not any("prompt_progress" in chunk for chunk in silent)
    assert len(silent) == len(chunks) - len(told)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
async def test_timings_come_with_every_chunk_if_asked_for(serve, path):
    server = await serve(FakeBackend(delay_s=0.002))
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
    chunks = streamed(
        await server.post(path, {**body, "timings_per_token": True}), has_done=path != "/completion"
    ).chunks
    timings = [chunk["timings"] for chunk in chunks]
    counts = [timing["predicted_n"] for timing in timings]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {timing["prompt_n"] for timing in timings} == {timings[-1]["prompt_n"]}
    assert 0 < timings[-2]["predicted_ms"] <= timings[-1]["predicted_ms"] + 1000
    last_only = streamed(await server.post(path, body), has_done=path != "/completion").chunks
    assert ["timings" in chunk for chunk in last_only] == [False] * (len(last_only) - 1) + [True]


async def test_the_props_say_what_is_served(serve):
    server = await serve(n_slots=3, served_model_name=("a", "b"))
    props = (await server.get("/props")).json
    assert (props["total_slots"], props["model_alias"], props["model_path"]) == (3, "a", "fake.gguf")
    assert (props["bos_token"], props["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert props["chat_template"] == "{{ messages }}"
    assert props["default_generation_settings"]["n_ctx"] == MAX_LEN
    without = await serve(template=None)
    assert (await without.get("/props")).json["chat_template"] == ""


async def test_nobody_waits_for_a_second_answer_in_llama_servers_form(serve):
    server = await serve(FakeBackend(delay_s=0.002))
    answers = await asyncio.gather(*(completion(server, f"{i} Hello", **GREEDY) for i in range(6)))
    alone = [await completion(server, f"{i} Hello", **GREEDY) for i in range(6)]
    assert [answer["content"] for answer in answers] == [answer["content"] for answer in alone]
