"""Text to tokens, conversations to prompts: /tokenize, /detokenize, /apply-template, /v1/chat/completions/render."""

import pytest

from scheduler.serve.service import MAX_CONTEXTS
from tests.scheduler.serve.rig import MAX_LEN, chat_body


async def test_llama_servers_tokenize_takes_content(server):
    plain = (await server.post("/tokenize", {"content": "Hé<|im_end|>"})).json
    assert plain["tokens"] == [72, 195, 169, 257]
    assert (plain["count"], plain["max_model_len"]) == (4, MAX_LEN)
    text = (await server.post("/tokenize", {"content": "<|im_end|>", "parse_special": False})).json
    assert bytes(text["tokens"]).decode() == "<|im_end|>"


async def test_pieces_are_text_or_bytes(server):
    pieces = (await server.post("/tokenize", {"content": "Hé", "with_pieces": True})).json["tokens"]
    assert pieces == [{"id": 72, "piece": "H"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]


async def test_a_begin_token_comes_where_the_model_wants_one_and_is_asked_for(server, monkeypatch):
    encode = type(server.service.tokenizer).encode

    def wants_bos(tokenizer, text, *, parse_special=True, add_bos=None):
        return encode(tokenizer, text, parse_special=parse_special, add_bos=True if add_bos is None else add_bos)

    monkeypatch.setattr(type(server.service.tokenizer), "encode", wants_bos)
    for body, begins in (
        ({"content": "H"}, False),
        ({"content": "H", "add_special": False}, False),
        ({"content": "H", "add_special": True}, True),
        ({"prompt": "H"}, True),
        ({"prompt": "H", "add_special_tokens": False}, False),
    ):
        assert (await server.post("/tokenize", body)).json["tokens"] == [256] * begins + [72], body


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "content": "a"}, {"content": "a", "messages": []}, {"prompt": "a", "messages": []}]
)
async def test_one_thing_at_a_time_is_tokenized(server, body):
    (await server.post("/tokenize", body)).refused(400, "prompt")


async def test_detokenize_answers_by_both_names(server):
    reply = (await server.post("/detokenize", {"tokens": [72, 195, 169, 257]})).json
    assert reply == {"prompt": "Hé<|im_end|>", "content": "Hé<|im_end|>"}


async def test_detokenize_takes_as_much_as_tokenize_and_no_more(server):
    most = [72] * (MAX_CONTEXTS * MAX_LEN)
    assert (await server.post("/detokenize", {"tokens": most})).json["content"] == "H" * len(most)
    error = (await server.post("/detokenize", {"tokens": [*most, 72]})).refused(400, "tokens")
    assert error["code"] == "context_length_exceeded"


async def test_a_template_is_applied_and_nothing_generated(server):
    prompt = (await server.post("/apply-template", chat_body("Hi<|im_end|>"))).json["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert server.engine.metrics.num_requests == 0
    (await server.post("/apply-template", {"messages": []})).refused(400, "messages")
    (await server.post("/apply-template", {**chat_body(), "model": "x"})).refused(404, "model")
    (await server.post("/apply-template", chat_body("refuse me"))).refused(400, "messages")


async def test_a_rendered_chat_is_the_prompt_of_the_answer(server):
    body = chat_body("Hi<|im_end|>", max_tokens=7, priority=3, request_id="r")
    rendered = (await server.post("/v1/chat/completions/render", body)).json
    assert server.engine.metrics.num_requests == 0
    answered = (await server.chat("Hi<|im_end|>", max_tokens=7, return_token_ids=True)).json
    assert rendered["token_ids"] == answered["prompt_token_ids"]
    assert (rendered["request_id"], rendered["max_tokens"], rendered["priority"]) == ("chatcmpl-r", 7, 3)
    unlimited = (await server.post("/v1/chat/completions/render", chat_body("Hi"))).json
    assert unlimited["max_tokens"] == MAX_LEN - len(unlimited["token_ids"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": -1}, "temperature"), ({"messages": []}, "messages"), ({"tools": [1]}, "tools")],
)
async def test_what_a_chat_would_be_refused_for_is_not_rendered(server, fields, param):
    (await server.post("/v1/chat/completions/render", {**chat_body(), **fields})).refused(400, param)


async def test_a_prompt_too_long_for_the_context_is_not_rendered(server):
    error = (await server.post("/v1/chat/completions/render", chat_body("x" * MAX_LEN))).refused(400, "messages")
    assert error["code"] == "context_length_exceeded"


WITH_CLOCK = {"chat_template_kwargs": {"clock": "%Y-%m-%d %H:%M:%S"}}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_templates_clock_is_fixed_by_the_request_and_reported(server, stream):
    fields = {**WITH_CLOCK, "chat_template_now": "2001-02-03T04:05:06+01:00", "max_tokens": 4, "temperature": 0}
    if stream:
        said = (await server.stream_chat(**fields)).chunks
        told = [chunk["chat_template_now"] for chunk in said if "chat_template_now" in chunk]
    else:
        told = [(await server.chat(**fields)).json["chat_template_now"]]
    assert told == ["2001-02-03T04:05:06+01:00"]
    prompt = (await server.post("/apply-template", {**chat_body(), **fields})).json["prompt"]
    assert prompt.endswith("2001-02-03 04:05:06")


async def test_the_reported_time_sent_again_makes_the_same_prompt(server):
    first = (await server.chat(**WITH_CLOCK, max_tokens=1, return_token_ids=True)).json
    again = (
        await server.chat(
            **WITH_CLOCK, max_tokens=1, return_token_ids=True, chat_template_now=first["chat_template_now"]
        )
    ).json
    assert again["prompt_token_ids"] == first["prompt_token_ids"]
    assert again["chat_template_now"] == first["chat_template_now"]
    other = (
        await server.chat(**WITH_CLOCK, max_tokens=1, return_token_ids=True, chat_template_now="1999-01-01T00:00:00Z")
    ).json
    assert other["prompt_token_ids"] != first["prompt_token_ids"]
    assert "chat_template_now" not in (await server.complete(max_tokens=1)).json
