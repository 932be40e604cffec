"""Rubbish gets a clear refusal before any generation, and the others never notice."""

import json

import pytest

from tests.live_server import LiveServer

HI = '"messages":[{"role":"user","content":"Hi"}]'


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "-0.5"),
        ("temperature", '"hot"'),
        ("temperature", "1e999"),
        ("temperature", "true"),
        ("temperature", "[1]"),
        ("top_p", "Infinity"),
        ("top_p", "1.5"),
        ("top_p", "-0.1"),
        ("presence_penalty", "-Infinity"),
        ("frequency_penalty", "3"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "NaN"),
        ("min_p", "-1"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("n", "0"),
        ("n", "true"),
        ("n", "1000000"),
        ("stream", '"yes"'),
        ("stream", "1"),
        ("max_tokens", "3.5"),
        ("seed", '"x"'),
        ("seed", "1.5"),
        ("logit_bias", '{"0": NaN}'),
        ("logit_bias", '{"0": 101}'),
        ("logit_bias", '{"x": 1}'),
        ("logit_bias", '{"49152": 1}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", "[1]"),
        ("allowed_token_ids", "[]"),
        ("allowed_token_ids", "[49152]"),
        ("stop_token_ids", "[-1]"),
        ("top_logprobs", "21"),
        ("top_logprobs", "-1"),
        ("min_tokens", "-1"),
    ],
)
@pytest.mark.parametrize("stream", ["false", "true"])
def test_25_a_number_outside_its_range_is_refused_by_name(server: LiveServer, field, value, stream):
    extra = '"logprobs":true,' if field == "top_logprobs" else ""
    streaming = "" if field == "stream" else f'"stream":{stream},'
    body = f'{{{HI},{streaming}{extra}"{field}":{value}}}'
    server.post("/v1/chat/completions", body.encode()).refused(param=field)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 49152], [-1], [2**40], [2**70], [1.5], [True], ["1", 2], [1, "2"], [[1, 2], []], [[1], "a"], [["a"]], "",
        [], [[]], [""], ["a", ""], None, 7, {"a": 1}, [None], [[[1]]],
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_27_a_prompt_that_is_no_prompt_is_refused(server: LiveServer, prompt, stream):
    server.complete(prompt, max_tokens=1, stream=stream).refused(param="prompt")


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 2, "allowed_token_ids": [2]},
        {"min_tokens": 2, "allowed_token_ids": [7], "stop_token_ids": [7]},
        {"bad_words": ["Hello"], "allowed_token_ids": [19556]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_leave_no_token_to_choose_are_refused(server: LiveServer, fields, stream):
    server.complete("Hi", max_tokens=4, stream=stream, **fields).refused(param="allowed_token_ids")


def test_parameters_that_leave_no_token_later_on_are_refused_too(server: LiveServer):
    fields = {"bad_words": ["HelloHello"], "allowed_token_ids": [19556]}
    server.complete("Hi", max_tokens=4, **fields).refused(param="allowed_token_ids")


def test_27_a_prompt_of_ids_is_taken_as_it_is(server: LiveServer):
    reply = server.complete([19556], max_tokens=1, echo=True).json
    assert reply["usage"]["prompt_tokens"] == 1
    assert reply["choices"][0]["text"].startswith("Hello")


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "application/x-www-form-urlencoded", "Application/JSON; charset=UTF-8", "nonsense"],
)
def test_29_any_content_type_is_taken_if_the_body_is_json(server: LiveServer, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    body = f'{{{HI},"max_tokens":1}}'.encode()
    assert server.request("POST", "/v1/chat/completions", body, headers).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b'""', b"null", b"[]", b"12", b"{}{}", b"{", b"{}", b'{"messages"', b"\xff\xfe{\x00}\x00", b"\x00",
        b'{"messages": [{"role": "user", "content": "\xff"}]}', b"true", b"<html>", b'{"messages": {}}',
        b'{"messages": []}', b'{"messages": [7]}', b'{"messages": [{}]}', b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "wizard", "content": "Hi"}]}', b'{"messages": [{"role": 7, "content": "Hi"}]}',
        b'{"messages": [{"role": "user", "content": 7}]}', b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', b'{"messages": "Hi"}',
        b'{"messages": null}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)  # fmt: skip
def test_29_a_body_that_is_no_request_is_refused(server: LiveServer, body):
    server.post("/v1/chat/completions", body).refused()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("key", ["ignored", "metadata", "messages", "stop", "logit_bias"])
def test_29_deep_nesting_is_refused_wherever_it_stands(server: LiveServer, opening, closing, key):
    nested = opening * 50_000 + "1" + closing * 50_000
    body = f'{{{HI},"max_tokens":1,"{key}":{nested}}}'
    server.post("/v1/chat/completions", body.encode()).refused()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]),
        ("tool_choice", {"type": "function", "function": {"name": "get_time"}}),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": 7}),
        ("response_format", "json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_39_and_s09_what_is_not_there_yet_is_refused_never_ignored(server: LiveServer, field, value, stream):
    server.chat("What time is it?", max_tokens=1, stream=stream, **{field: value}).refused(param=field)


def test_39_the_values_that_ask_for_nothing_are_taken(server: LiveServer):
    reply = server.chat("Hi", max_tokens=1, tools=[], tool_choice="none", response_format={"type": "text"})
    assert reply.status == 200


def test_s01_unknown_fields_names_and_metadata_are_ignored(server: LiveServer):
    messages = [{"role": "user", "content": "Hi", "name": "ada", "metadata": {"a": [1]}}]
    reply = server.chat(messages, max_tokens=1, user="u", metadata={"k": "v"}, store=False, something_new={"a": 1})
    assert reply.status == 200
    assert reply.json["usage"]["prompt_tokens"] == 31


def test_49_a_template_in_the_request_is_never_run(server: LiveServer):
    reply = server.chat("Hi", max_tokens=1, chat_template="{{ 1 / 0 }}")
    assert reply.status in {200, 400}
    if reply.status == 400:
        reply.refused(param="chat_template")


def test_an_over_large_body_is_refused_in_the_envelope(server: LiveServer):
    body = json.dumps({"prompt": "x" * 64_000_000}).encode()
    server.post("/v1/completions", body).refused(413)
