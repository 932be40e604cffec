"""POST /v1/completions: prompts of every shape, echo, log-probabilities."""

import asyncio
import threading
from collections import Counter

import pytest

from scheduler.serve.http.completions import CompletionForm
from scheduler.serve.wire import sampling
from tests.fakes import FakeBackend
from tests.live_server import parse_sse
from tests.scheduler.serve.rig import HANG_GUARD_S, MAX_LEN, until

PROMPTS = ["red is a", "two plus", "cat and"]


def alphabet(row, request, _index):
    """The first token after the prompt is "a", then "b", ..."""
    return ord("a") + (len(row) - len(request.prompt_ids)) % 26


async def test_s03_and_s19_a_batch_of_prompts_with_n_is_answered_prompt_by_prompt(server):
    options = {"n": 2, "echo": True, "max_tokens": 4, "temperature": 0.8, "seed": 3}
    reply = (await server.complete(PROMPTS, **options)).json
    assert reply["object"] == "text_completion"
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for choice in reply["choices"]:
        assert choice["text"].startswith(PROMPTS[choice["index"] // 2])
    assert reply["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    assert reply["usage"]["completion_tokens"] == 24
    stream = await server.stream_completion(PROMPTS, stream_options={"include_usage": True}, **options)
    assert [stream.text(index) for index in range(6)] == [choice["text"] for choice in reply["choices"]]
    assert all(len(stream.finish_reasons(index)) == 1 for index in range(6))
    assert stream.usage == reply["usage"]


async def test_each_prompt_of_a_batch_gets_what_it_would_have_got_alone(server):
    options = {"max_tokens": 8, "seed": 7, "temperature": 1.0}
    together = (await server.complete(PROMPTS, **options)).json["choices"]
    alone = [(await server.complete(prompt, **options)).json["choices"][0] for prompt in PROMPTS]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]


async def test_prompts_without_a_seed_draw_one_each(server):
    choices = (await server.complete(PROMPTS, max_tokens=1, n=2)).json["choices"]
    assert len({choice["seed"] for choice in choices}) == 3


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [72, 105], [[72, 105]]])
async def test_the_same_prompt_in_every_shape_gets_the_same_answer(server, prompt):
    reply = (await server.complete(prompt, max_tokens=5, temperature=0, echo=True)).json
    assert reply["choices"][0]["text"].startswith("Hi")
    assert (
        reply["choices"][0]["text"]
        == (await server.complete("Hi", max_tokens=5, temperature=0, echo=True)).json["choices"][0]["text"]
    )
    assert reply["usage"]["prompt_tokens"] == 2


async def test_control_tokens_are_parsed_in_a_raw_prompt(server):
    assert (await server.complete("<|im_start|>Hello", max_tokens=1)).json["usage"]["prompt_tokens"] == 6


async def test_21_no_tokens_at_all_are_for_scoring_a_prompt(server):
    plain = (await server.complete("Hello", max_tokens=0)).json
    assert plain["choices"][0]["text"] == ""
    assert plain["choices"][0]["finish_reason"] == "length"
    assert plain["usage"]["completion_tokens"] == 0
    scored = (await server.complete("Hello", max_tokens=0, echo=True, logprobs=1)).json["choices"][0]
    assert scored["text"] == "Hello"
    assert scored["logprobs"] == {
        "tokens": ["H", "e", "l", "l", "o"],
        "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"e": -0.5}, {"l": -0.5}, {"l": -0.5}, {"o": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    stream = await server.stream_completion("Hello", max_tokens=0, echo=True)
    assert stream.text() == "Hello"
    assert stream.finish_reasons() == ["length"]


async def test_completion_logprobs_of_an_answer_go_on_after_the_echo(serve):
    server = await serve(FakeBackend(next_token=alphabet))
    log = (await server.complete("xy", max_tokens=3, echo=True, logprobs=2)).json["choices"][0]["logprobs"]
    assert log["tokens"] == ["x", "y", "a", "b", "c"]
    assert log["text_offset"] == [0, 1, 2, 3, 4]
    assert log["token_logprobs"] == [None] + [-0.5] * 4
    assert log["top_logprobs"][2] == {"a": -0.5, "b": -1.5}


async def test_the_chosen_token_is_among_the_top_logprobs_even_if_none_are_asked_for(server):
    choice = (await server.complete("xy", max_tokens=3, logprobs=0)).json["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{token: -0.5} for token in choice["logprobs"]["tokens"]]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_text_offsets_count_characters_not_bytes_in_a_stream_too(serve):
    data = "é€x".encode()
    server = await serve(FakeBackend(next_token=lambda row, *_: data[len(row) - 2]))
    plain = (await server.complete("ab", max_tokens=6, logprobs=0)).json["choices"][0]["logprobs"]
    assert plain["text_offset"] == [0, 0, 1, 1, 1, 2]
    assert plain["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    stream = await server.stream_completion("ab", max_tokens=6, logprobs=0)
    logs = [chunk["choices"][0]["logprobs"] for chunk in stream.chunks]
    assert [offset for log in logs if log for offset in log["text_offset"]] == plain["text_offset"]


async def test_ids_are_returned_when_asked_for(server):
    reply = (await server.complete(["Hi", "you"], max_tokens=3, return_token_ids=True)).json
    for choice, prompt in zip(reply["choices"], ["Hi", "you"], strict=True):
        assert bytes(choice["prompt_token_ids"]).decode() == prompt
        assert bytes(choice["token_ids"]).decode() == choice["text"]
    stream = await server.stream_completion(["Hi", "you"], max_tokens=3, return_token_ids=True)
    for index, prompt in enumerate(["Hi", "you"]):
        mine = [c for chunk in stream.chunks for c in chunk["choices"] if c["index"] == index]
        assert bytes(mine[0]["prompt_token_ids"]).decode() == prompt
        assert bytes(i for c in mine for i in c.get("token_ids", [])).decode() == stream.text(index)
    assert "token_ids" not in (await server.complete(max_tokens=1)).json["choices"][0]


async def test_prompt_logprobs_belong_to_their_choice(server):
    choices = (await server.complete(["ab", "cd"], max_tokens=1, prompt_logprobs=0)).json["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [
        [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}],
        [None, {"100": {"logprob": -0.5, "rank": 1, "decoded_token": "d"}}],
    ]


async def test_23_an_answer_ends_with_the_context(server):
    prompt = [65] * (MAX_LEN - 1)
    for limit in ({}, {"max_tokens": 50}):
        reply = (await server.complete(prompt, **limit)).json
        assert reply["usage"]["completion_tokens"] == 1
        assert reply["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_is_truncated_from_the_left_when_asked(server):
    reply = (await server.complete("x" * 5000 + "end", truncate_prompt_tokens=3, max_tokens=1, echo=True)).json
    assert reply["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("prompt", ["a long beginning and the end", list(b"a long beginning and the end")])
async def test_of_a_truncated_prompt_only_what_was_kept_is_echoed(server, prompt):
    fields = {"truncate_prompt_tokens": 3, "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 0}
    (choice,) = (await server.complete(prompt, **fields)).json["choices"]
    alone = (await server.complete("end", **fields)).json["choices"][0]
    assert choice["text"] == alone["text"]
    assert choice["text"].startswith("end")
    assert choice["logprobs"] == alone["logprobs"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


async def test_best_of_that_asks_for_nothing_more_is_taken(server):
    reply = await server.complete(max_tokens=1, n=2, best_of=2, suffix="", spaces_between_special_tokens=True)
    assert reply.status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_other_servers_know_and_what_changes_nothing_is_taken(server, path):
    ours = {"max_tokens": 2, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    of_no_effect = {
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": True,
        "cache_salt": "s",
        "cache_prompt": False,
        "spaces_between_special_tokens": False,
        "n_keep": -1,
        "id_slot": -1,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "xtc_probability": 0,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "top_n_sigma": -1.0,
        "lora": [],
        "grammar": "",
        "response_fields": [],
        "priority": -3,
        "n_predict": -1,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "u",
        "session_id": "s",
        "include_reasoning": True,
        "reasoning_format": "auto",
        "sse_ping_interval": -1,
        "n_cache_reuse": 256,
        "length_penalty": 1.0,
        "truncation_side": "left",
        "watermarking": False,
        "vllm_xargs": {},
    }
    choices = [(await server.post(path, body)).json["choices"] for body in (ours, ours | of_no_effect)]
    for (choice,) in choices:
        del choice["seed"]
    assert choices[0] == choices[1]


@pytest.mark.parametrize("prompt", ["Hello", ["ab", "cde"]])
@pytest.mark.parametrize(
    "fields",
    [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 0, "prompt_logprobs": 2}],
)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_streams_echo_and_prompt_logprobs_are_those_of_the_plain_answer(server, prompt, fields, n, max_tokens):
    asked = {**fields, "n": n, "max_tokens": max_tokens, "seed": 5, "temperature": 1.0}
    plain = (await server.complete(prompt, **asked)).json["choices"]
    stream = await server.stream_completion(prompt, **asked)
    for whole in plain:
        own = [c for chunk in stream.chunks for c in chunk["choices"] if c["index"] == whole["index"]]
        assert "".join(choice["text"] for choice in own) == whole["text"]
        logs = [choice["logprobs"] for choice in own if choice["logprobs"]]
        if whole["logprobs"] is None:
            assert logs == []
        else:
            joined = {name: [entry for log in logs for entry in log[name]] for name in whole["logprobs"]}
            assert joined == whole["logprobs"]
        scored = [choice["prompt_logprobs"] for choice in own if "prompt_logprobs" in choice]
        assert scored == ([whole["prompt_logprobs"]] if "prompt_logprobs" in whole else [])
        assert all("prompt_logprobs" not in choice for choice in own[1:])


async def test_a_chat_streams_its_prompt_logprobs_with_the_first_chunk(server):
    plain = (await server.chat(prompt_logprobs=1, n=2, max_tokens=2)).json
    first, *others = (await server.stream_chat(prompt_logprobs=1, n=2, max_tokens=2)).chunks
    assert first["prompt_logprobs"] == plain["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk for chunk in others)


@pytest.mark.parametrize("limit", [None, 0, 1, 40])
async def test_a_prompt_can_be_truncated_to_what_leaves_room_for_the_answer(server, limit):
    fields = {} if limit is None else {"max_tokens": limit}
    reply = (await server.complete("x" * 1000, truncate_prompt_tokens=-1, **fields)).json
    room = max(1, limit or 1)
    assert reply["usage"]["prompt_tokens"] == MAX_LEN - room
    assert reply["usage"]["completion_tokens"] == (1 if limit is None else limit)
    assert (await server.complete("short", truncate_prompt_tokens=-1, max_tokens=1)).json["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_metrics_of_an_answer_add_up_and_agree_with_its_timings(serve, n, stream):
    server = await serve(FakeBackend(delay_s=0.002))
    asked = {"max_tokens": 4, "n": n, "request_id": "x"}
    if stream:
        answer = [chunk for chunk in (await server.stream_completion(**asked)).chunks if "metrics" in chunk]
        assert len(answer) == 1
        metrics, timings = answer[0]["metrics"], answer[0]["timings"]
    else:
        answer = (await server.complete(**asked)).json
        metrics, timings = answer["metrics"], answer["timings"]
    parts = [metrics[name] for name in ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")]
    assert sum(parts) == pytest.approx(metrics["e2e_time_ms"], abs=1e-6)
    assert parts == [timings["queue_ms"], timings["prompt_ms"], timings["predicted_ms"]]
    assert metrics["tokens_per_second"] == timings["predicted_per_second"]
    if n == 1:
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 3, abs=1e-3)
    else:
        assert metrics["mean_itl_ms"] is None


async def test_more_prompts_than_an_idle_server_takes_are_a_mistake_not_a_reason_to_come_again(serve):
    server = await serve(n_slots=2, max_queue=1)
    error = (await server.complete(["a", "b", "c", "d"])).refused(400)
    assert (error["param"], error["message"]) == (
        "prompt",
        "prompt needs 2 places in the queue beside 2 slots, the queue has 1 place",
    )
    reply = await server.complete(["a", "b", "c"], max_tokens=1)
    assert len(reply.json["choices"]) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1, "max_tokens": 0, "n": 3},
        {"echo": True, "logprobs": 0, "prompt_logprobs": 1, "n": 2},
    ],
)
@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_scored_prompt_that_is_ended_is_answered_with_what_there_is(serve, fields, num_prompts):
    computed, prompt = 128, "Hello" * 40
    opened = threading.Event()

    def wait(work):
        if work.chunk.start >= computed:
            opened.wait(HANG_GUARD_S)

    server = await serve(FakeBackend(fault=wait))
    choices = []
    try:
        for stream in (False, True):
            asked = {**fields, "request_id": "mine", "stream": stream, "seed": 1}
            call = asyncio.create_task(server.complete([prompt] * num_prompts, **asked))
            await until(lambda: server.engine.slots()[0].num_computed == computed)
            await server.request("DELETE", "/v1/requests/mine")
            reply = await call
            assert reply.status == 200
            if not stream:
                timings = reply.json["timings"]
                assert (timings["prompt_n"], timings["predicted_per_second"]) == (computed, None)
                choices = reply.json["choices"]
            opened.set()
            await until(lambda: server.engine._scheduler._in_flight is None)
            opened.clear()
    finally:
        opened.set()
    assert len(choices) == num_prompts * fields.get("n", 1)
    chunks = parse_sse(reply.body).chunks
    for whole in choices:
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == whole["index"]]
        assert [whole["finish_reason"], own[-1]["finish_reason"]] == ["abort", "abort"]
        assert whole["text"] == "".join(choice["text"] for choice in own) == (prompt if "echo" in fields else "")
        num_scored = computed + 1 if whole["index"] < fields.get("n", 1) else 1
        if "echo" in fields:
            assert whole["logprobs"]["tokens"] == list(prompt[:num_scored])
            assert whole["logprobs"] == next(choice["logprobs"] for choice in own if choice["logprobs"])
        if "prompt_logprobs" in fields:
            assert len(whole["prompt_logprobs"]) == num_scored
            assert [whole["prompt_logprobs"]] == [c["prompt_logprobs"] for c in own if "prompt_logprobs" in c]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_scores_of_a_prompt_are_written_down_once_whatever_n(serve, fields, stream):
    server = await serve()
    looked_up = Counter()
    token_bytes = server.service.tokenizer.token_bytes
    server.service.tokenizer.token_bytes = lambda token_id: looked_up.update([token_id]) or token_bytes(token_id)
    lookups = []
    for n in (1, 8):
        looked_up.clear()
        assert (await server.complete("\x01\x02\x03", n=n, max_tokens=0, stream=stream, **fields)).status == 200
        lookups.append([looked_up[token_id] for token_id in (1, 2, 3)])
    assert lookups[0] == lookups[1]
    assert min(lookups[0][1:]) > 0  # the first has no score


async def test_a_large_answer_is_written_down_off_the_event_loop(server, monkeypatch):
    threads = []
    write = CompletionForm.whole
    monkeypatch.setattr(
        CompletionForm, "whole", lambda *args: threads.append(threading.current_thread()) or write(*args)
    )
    for n in (1, 2, 3):
        asked = {"echo": True, "logprobs": 1, "n": n, "max_tokens": 0}
        assert len((await server.complete("x" * 250, **asked)).json["choices"]) == n
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False]


async def test_choices_of_a_call_are_limited_over_all_its_prompts(server):
    prompts = ["x"] * 9
    refused = await server.complete(prompts, n=128)
    assert "n times the number of prompts must be <= 1024, got 128 x 9" in refused.refused(400, "n")["message"]
    assert len((await server.complete(prompts[:8], n=128, max_tokens=0)).json["choices"]) == 1024


@pytest.mark.parametrize(
    ("field", "fields"), [("logprobs", {"echo": True, "logprobs": 20}), ("prompt_logprobs", {"prompt_logprobs": 20})]
)
async def test_a_prompts_scores_that_make_too_large_an_answer_are_refused(server, monkeypatch, field, fields):
    monkeypatch.setattr(sampling, "MAX_PROMPT_ENTRIES", 210)
    asked = {"max_tokens": 0, **fields}
    assert (await server.complete("Hello", n=2, **asked)).status == 200
    for prompt, n in (("Hello!", 2), (["Hello", "you!!!"], 1), ("Hello", 3)):
        (await server.complete(prompt, n=n, **asked)).refused(400, field)
    told_once = [{"role": "user", "content": "x" * 100}]
    (await server.chat(told_once, max_tokens=1, prompt_logprobs=20)).refused(400, "prompt_logprobs")
