"""Rubbish is refused by name, with a status and the envelope, before any generation, streamed or not."""

import json

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from engine.errors import CacheError
from tests.scheduler.serve.rig import MAX_LEN, FakeTemplate, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI = '"messages":[{"role":"user","content":"Hi"}]'
PATHS = ["/v1/chat/completions", "/v1/completions"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_server():
    async with serve() as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def server(shared_server):
    """When a test is over nothing must have been submitted, and a good request must still be answered."""
    before = shared_server.engine.metrics.num_requests
    yield shared_server
    assert shared_server.engine.metrics.num_requests == before
    assert (await shared_server.complete("Hi", max_tokens=1)).status == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "-0.5"),
        ("temperature", '"hot"'),
        ("temperature", "1e999"),
        ("temperature", "true"),
        ("top_p", "Infinity"),
        ("top_p", "1.5"),
        ("presence_penalty", "-Infinity"),
        ("frequency_penalty", "3"),
        ("repetition_penalty", "0"),
        ("min_p", "-1"),
        ("typical_p", "2"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("n", "0"),
        ("n", "-1"),
        ("n", "true"),
        ("n", "129"),
        ("n", str(2**70)),
        ("stream", '"yes"'),
        ("stream", "1"),
        ("max_tokens", "3.5"),
        ("max_tokens", "3.0"),
        ("max_tokens", "-1"),
        ("max_tokens", str(2**70)),
        ("max_tokens", str(-(2**70))),
        ("max_completion_tokens", "-1"),
        ("min_tokens", "-1"),
        ("seed", '"x"'),
        ("seed", "1.5"),
        ("logit_bias", '{"0": NaN}'),
        ("logit_bias", '{"0": 101}'),
        ("logit_bias", '{"x": 1}'),
        ("logit_bias", '{"258": 1}'),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"1": "1"}'),
        ("logit_bias", "[1]"),
        ("allowed_token_ids", "[]"),
        ("allowed_token_ids", "[258]"),
        ("allowed_token_ids", '"1"'),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", "[true]"),
        ("bad_words", '[""]'),
        ("bad_words", "[7]"),
        ("ignore_eos", "1"),
        ("truncate_prompt_tokens", "0"),
        ("truncate_prompt_tokens", "-2"),
        ("repeat_last_n", "-2"),
        ("repeat_penalty", "0"),
        ("repeat_penalty", '"1"'),
        ("n_predict", "-2"),
        ("return_progress", "1"),
        ("timings_per_token", "1"),
        ("grammar", '"root ::= x"'),
        ("json_schema", "{}"),
        ("mirostat", "2"),
        ("dry_multiplier", "0.8"),
        ("xtc_probability", "0.1"),
        ("lora", '[{"id": 0, "scale": 1}]'),
        ("image_data", '["x"]'),
        ("samplers", '["top_k"]'),
        ("min_keep", "false"),
        ("post_sampling_probs", "0"),
        ("request_id", '"a b"'),
        ("request_id", '""'),
        ("model", "7"),
        ("stream_options", "true"),
        ("guided_json", "{}"),
        ("use_beam_search", "true"),
        ("length_penalty", "2.0"),
        ("truncation_side", '"right"'),
        ("logprob_token_ids", "[1]"),
        ("vllm_xargs", '{"x": 1}'),
        ("kv_transfer_params", "{}"),
        ("ec_transfer_params", "{}"),
        ("repetition_detection", "{}"),
        ("watermarking", "true"),
        ("priority", "1.5"),
        ("priority", "true"),
        ("response_format", '{"type": "json_object"}'),
        ("return_token_ids", '"yes"'),
    ],
)
@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("path", PATHS)
async def test_25_a_value_outside_its_range_is_refused_by_name(server, path, field, value, stream):
    streaming = "" if field == "stream" else f'"stream":{stream},'
    body = f'{{{HI},"prompt":"Hi",{streaming}"{field}":{value}}}'
    (await server.post(path, body.encode())).refused(param=field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 1),
        ("top_logprobs", 2),  # without logprobs
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": 7}),
        ("response_format", "json"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("echo", True),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("thinking_token_budget", 100),
        ("add_special_tokens", True),
        ("return_prompt_text", True),
        ("mm_processor_kwargs", {"x": 1}),
        ("media_io_kwargs", {"x": 1}),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"now": 1}),
        ("chat_template_kwargs", [1]),
        ("chat_template_now", "tomorrow"),
        ("chat_template_now", 1e9),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_39_and_s09_what_a_chat_cannot_have_is_refused_never_ignored(server, field, value, stream):
    (await server.chat(stream=stream, **{field: value})).refused(param=field)


@pytest.mark.parametrize("top_logprobs", [-1, 21])
async def test_top_logprobs_is_named_as_chats_call_it(server, top_logprobs):
    (await server.chat(logprobs=True, top_logprobs=top_logprobs)).refused(param="top_logprobs")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("logprobs", 21),
        ("logprobs", -1),
        ("echo", "yes"),
        ("best_of", 2),
        ("suffix", "x"),
        ("add_special_tokens", False),
    ],
)
async def test_what_a_completion_cannot_have_is_refused(server, field, value):
    (await server.complete(**{field: value})).refused(param=field)


@pytest.mark.parametrize("stop", ["", [""], ["\n\n", ""], [7], {"a": 1}, 7, True, [None], [["x"]], ["x"] * 65])
@pytest.mark.parametrize("path", PATHS)
async def test_05_a_stop_that_means_nothing_is_refused(server, path, stop):
    body = {"stop": stop, "max_tokens": 4, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    for stream in (False, True):
        (await server.post(path, {**body, "stream": stream})).refused(param="stop")


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 258], [-1], [2**40], [2**70], [1.5], [True], ["1", 2], [1, "2"], [[1, 2], []], [[1], "a"], [["a"]], "",
        [], [[]], [""], ["a", ""], None, 7, True, {"a": 1}, [None], [[[1]]], [{}], ["a"] * 257,
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_27_a_prompt_that_is_no_prompt_is_refused(server, prompt, stream):
    (await server.complete(prompt, max_tokens=1, stream=stream)).refused(param="prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"", b" \n", b'""', b"null", b"[]", b"12", b"{}{}", b"{}]", b"{", b"{}", b'{"messages"', b"\xff\xfe{\x00}\x00",
        b"\x00", b"true", b"<html>", b"NaN", b"{'messages': []}", b'{"a": 1,}', b'{"a": 01}', b'{\x00"\x00a\x00',
        b'{"messages": [{"role": "user", "content": "\xff"}]}', b'{"messages": {}}', b'{"messages": "Hi"}',
        b'{"messages": []}', b'{"messages": [7]}', b'{"messages": [{}]}', b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "wizard", "content": "Hi"}]}', b'{"messages": [{"role": 7, "content": "Hi"}]}',
        b'{"messages": [{"role": null, "content": "Hi"}]}', b'{"messages": [{"role": ["user"], "content": "Hi"}]}',
        b'{"messages": [{"role": "user", "content": 7}]}', b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"messages": [{"role": "user", "content": null}]}', b'{"messages": [{"role": "user", "content": []}]}',
        b'{"messages": [{"role": "user", "content": ["Hi"]}]}', b'{"messages": null}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"\\ud800": 1}',
        b'{"messages": [{"role": "user", "content": "\x01"}]}',
        b'{"ignored": NaN, "messages": [{"role": "user", "content": "Hi"}]}',
        b'{"n": ' + b"9" * 5000 + b"}", b'{"temperature": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
async def test_29_a_body_that_is_no_request_is_refused(server, path, body):
    (await server.post(path, body)).refused()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"temperature": NaN}', "temperature"),
        ('{"logit_bias": {"1": -Infinity}}', "logit_bias"),
        ('{"metadata": {"a": [1, {"b": NaN}]}}', "metadata"),
        ('{"user": "\\ud83d"}', "user"),
    ],
)
async def test_what_json_cannot_say_is_refused_by_name_wherever_it_stands(server, body, param):
    error = (await server.post(PATHS[0], body.encode())).refused(param=param)
    assert param in error["message"]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("key", ["ignored", "metadata", "messages", "stop", "logit_bias", "prompt"])
async def test_29_deep_nesting_is_refused_wherever_it_stands(server, opening, closing, key):
    nested = opening * 50_000 + "1" + closing * 50_000
    for body in (f'{{{HI},"max_tokens":1,"{key}":{nested}}}', opening * 50_000):
        (await server.post(PATHS[0], body.encode())).refused()


@pytest.mark.parametrize("field", ["include_usage", "continuous_usage_stats"])
async def test_stream_options_without_stream_are_refused(server, field):
    for stream in ({}, {"stream": False}):
        (await server.chat(stream_options={field: True}, **stream)).refused(param="stream_options")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [MAX_LEN, MAX_LEN + 1, 5000])
async def test_23_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(server, stream, length):
    for reply in (
        await server.complete([65] * length, stream=stream),
        await server.complete(["a", "b" * length], stream=stream),
        await server.chat("a" * length, stream=stream),
    ):
        error = reply.refused()
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_LEN) in error["message"]
    assert str(length) in (await server.complete([65] * length)).refused()["message"]


async def test_a_huge_prompt_is_refused_without_tokenizing_it(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.service.tokenizer, "encode", lambda *_args, **_kwargs: pytest.fail("it was tokenized"))
        for reply in (await server.complete("x" * 10_000_000), await server.chat("x" * 10_000_000)):
            assert reply.refused()["code"] == "context_length_exceeded"


async def test_a_prompt_too_long_is_told_in_the_words_clients_look_for(server):
    for reply in (await server.complete([65] * MAX_LEN), await server.chat("x" * 10_000_000)):
        message = reply.refused()["message"]
        assert "prompt is too long" in message  # LangChain
        assert "this model's maximum context length is" in message  # litellm


async def test_text_that_is_to_be_cut_or_only_counted_may_be_longer_but_not_without_end(server):
    assert (await server.post("/tokenize", {"prompt": "x" * 40_000})).json["count"] == 40_000
    for reply in (
        await server.post("/tokenize", {"prompt": "x" * 100_000}),
        await server.complete("x" * 100_000, truncate_prompt_tokens=1),
    ):
        assert reply.refused(param="prompt")["code"] == "context_length_exceeded"


async def test_both_template_flags_at_once_are_refused(server):
    messages = [{"role": "assistant", "content": "The"}]
    reply = await server.chat(messages, add_generation_prompt=True, continue_final_message=True)
    reply.refused(param="continue_final_message")


async def test_what_the_template_refuses_is_told_in_its_words(server):
    error = (await server.chat("refuse me")).refused(param="messages")
    assert error["message"] == "the template refuses these messages"


async def test_what_a_template_makes_too_long_is_not_tokenized(server, monkeypatch):
    monkeypatch.setattr(server.service.tokenizer, "encode", lambda *_, **__: pytest.fail("the text was tokenized"))
    reply = await server.chat(chat_template_kwargs={"note": "x" * 20_000})
    assert reply.refused(400, "messages")["code"] == "context_length_exceeded"


async def test_without_a_template_a_chat_is_refused_and_completions_work():
    async with serve(template=None) as server:
        (await server.chat()).refused(param="messages")
        assert (await server.complete(max_tokens=1)).status == 200


@pytest.mark.slow
async def test_a_template_that_breaks_is_our_fault_and_told_without_names():
    class Broken(FakeTemplate):
        def render(self, *_args, **_kwargs):
            raise KeyError("secret internals")

    async with serve(template=Broken()) as server:
        error = (await server.chat()).refused(500)
    assert "secret" not in error["message"]


async def test_an_error_of_ours_that_no_client_can_cause_is_in_the_log():
    class Broken(FakeTemplate):
        def render(self, *_args, **_kwargs):
            raise CacheError("a gap in the cache")

    async with serve(template=Broken()) as server:
        with capture_logs() as logged:
            error = (await server.chat()).refused(500)
    assert "cache" not in error["message"]
    (line,) = [line for line in logged if line["event"] == "handler failed"]
    assert (line["log_level"], line["path"], line["exc_info"]) == ("error", "/v1/chat/completions", True)


async def test_an_unknown_model_is_not_found(server):
    for reply in (
        await server.chat(model="nope"),
        await server.complete(model="nope", stream=True),
        await server.post("/tokenize", {"model": "nope", "prompt": "x"}),
    ):
        error = reply.refused(404, param="model")
        assert error["code"] == "model_not_found"
        assert error["message"].endswith("does not exist, this server has 'fake'")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"tools": [{}]}, "the parameter tools is not supported yet"),
        ({"response_format": {"type": "json_object"}}, 'not supported yet, only {"type": "text"} is taken'),
        ({"tool_choice": "required"}, 'not supported yet, only "none" or "auto" is taken'),
    ],
)
async def test_what_is_not_supported_says_what_is(server, field, message):
    error = (await server.chat(**field)).refused(400, next(iter(field)))
    assert error["code"] == "unsupported_parameter"
    assert error["message"].endswith(message)


async def test_a_number_of_many_digits_costs_nothing(server):
    body = json.dumps({"prompt": "Hi"})[:-1] + ',"seed": ' + "9" * 100_000 + "}"
    (await server.post(PATHS[1], body.encode())).refused(param="seed")


@pytest.mark.parametrize(("field", "value"), [("max_tokens", -1), ("max_tokens", 0), ("n_predict", 0)])
async def test_a_limit_that_another_wins_over_is_checked_all_the_same(server, field, value):
    (await server.chat(**{"max_completion_tokens": 2, field: value})).refused(400, field)
