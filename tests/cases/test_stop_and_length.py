"""Where an answer ends: stop strings, EOS, max_tokens, the context."""

import pytest

from tests.cases.conftest import CONTEXT
from tests.live_server import LiveServer

COUNTING = "one, two, three, four, five, six, seven, eight, nine, ten.\n" * 3 + "one, two, three,"


def test_03_no_piece_of_a_stop_string_that_spans_tokens_is_sent(server: LiveServer):
    options = {"max_tokens": 12, "temperature": 0}
    reference = server.complete(COUNTING, **options, logprobs=0).json["choices"][0]
    text = reference["text"]
    tokens = reference["logprobs"]["tokens"]
    stop = "our, five, si"
    assert stop in text
    assert stop not in tokens
    expected = text[: text.index(stop)]
    plain = server.complete(COUNTING, **options, stop=stop).json
    assert plain["choices"][0]["text"] == expected
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert plain["choices"][0]["stop_reason"] == stop
    stream = server.stream_completion(COUNTING, **options, stop=[stop])
    assert stream.text() == expected
    assert stream.finish_reasons() == ["stop"]
    length, num_tokens = 0, 0
    for token in tokens:
        length, num_tokens = length + len(token), num_tokens + 1
        if length >= text.index(stop) + len(stop):
            break
    assert plain["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("options", [{"stop": ["our, five, si", "five,"]}, {"stop": ["five,", "our, five, si"]}])
def test_03_the_stop_that_completes_first_wins_whatever_the_order(server: LiveServer, options):
    text = server.complete(COUNTING, max_tokens=12, temperature=0).json["choices"][0]["text"]
    cut = server.complete(COUNTING, max_tokens=12, temperature=0, **options).json["choices"][0]
    assert cut["text"] == text[: text.index("five,")]


@pytest.mark.parametrize("stop", ["", [""], ["\n\n", ""], [7], {"a": 1}, 7, True, [None], [["x"]], ["x"] * 65])
def test_05_a_stop_that_means_nothing_is_refused(server: LiveServer, stop):
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {"stop": stop, "max_tokens": 4, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
        server.post(path, body).refused(param="stop")
        server.post(path, {**body, "stream": True}).refused(param="stop")


def test_05_null_and_an_empty_list_are_no_stop_at_all(server: LiveServer):
    expected = server.complete("Hi", max_tokens=4, temperature=0).json["choices"][0]["text"]
    for stop in (None, []):
        assert server.complete("Hi", max_tokens=4, temperature=0, stop=stop).json["choices"][0]["text"] == expected


def test_05_sixty_four_long_stops_are_honoured(server: LiveServer):
    stops = [chr(ord("A") + i % 26) * 1000 + str(i) for i in range(63)] + [" six"]
    text = server.complete(COUNTING, max_tokens=12, temperature=0).json["choices"][0]["text"]
    cut = server.complete(COUNTING, max_tokens=12, temperature=0, stop=stops).json["choices"][0]["text"]
    assert cut == text[: text.index(" six")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_21_max_tokens_null_is_absent_zero_and_negative_are_refused_one_is_one(server: LiveServer, path):
    base = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "seed": 0}
    one = server.post(path, {**base, "max_tokens": 1}).json
    assert one["usage"]["completion_tokens"] == 1
    unlimited = [server.post(path, {**base, **extra}).json for extra in ({}, {"max_tokens": None})]
    assert unlimited[0]["choices"] == unlimited[1]["choices"]
    assert unlimited[0]["usage"] == unlimited[1]["usage"]
    for bad in (-1, -(2**70), 2**70, 1.5, "3", True):
        for stream in (False, True):
            server.post(path, {**base, "max_tokens": bad, "stream": stream}).refused(param="max_tokens")


def test_21_zero_tokens_are_for_completions_alone(server: LiveServer):
    server.chat("Hi", max_tokens=0).refused(param="max_tokens")
    for extra in ({}, {"echo": True, "logprobs": 1}):
        reply = server.complete("Hello world", max_tokens=0, **extra).json
        assert reply["choices"][0]["text"] == ("Hello world" if extra else "")
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 0
    logprobs = reply["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Hello world"
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])


def test_21_max_completion_tokens_wins_over_max_tokens(server: LiveServer):
    reply = server.chat("Hi", max_completion_tokens=2, max_tokens=9, temperature=0).json
    assert reply["usage"]["completion_tokens"] == 2


def test_23_a_generation_without_end_ends_with_the_context(server: LiveServer):
    prompt = [19556, 198] * 100
    stream = server.stream_completion(
        prompt, logit_bias={"0": -100, "2": -100}, temperature=0, stream_options={"include_usage": True}
    )
    assert stream.finish_reasons() == ["length"]
    assert stream.usage["prompt_tokens"] == 200
    assert 0 < stream.usage["completion_tokens"] <= CONTEXT - 200


@pytest.mark.parametrize("stream", [False, True])
def test_23_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(server: LiveServer, stream):
    for length in (CONTEXT, CONTEXT + 1, 5000):
        error = server.complete([19556] * length, stream=stream).refused()
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"]
        assert str(CONTEXT) in error["message"]
    assert server.complete([19556] * (CONTEXT - 1), max_tokens=5).json["usage"]["completion_tokens"] == 1


def test_s15_eos_ends_with_stop_is_counted_and_has_no_text(server: LiveServer):
    options = {"temperature": 0, "max_tokens": 64}
    reply = server.chat("Name three primary colors.", **options).json
    text = reply["choices"][0]["message"]["content"]
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in text
    assert text.startswith("The primary colors are")
    count = reply["usage"]["completion_tokens"]
    at_limit = server.chat("Name three primary colors.", temperature=0, max_tokens=count).json
    assert at_limit["choices"][0]["finish_reason"] == "stop"
    assert at_limit["usage"]["completion_tokens"] == count
    cut = server.chat("Name three primary colors.", temperature=0, max_tokens=count - 1).json
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["message"]["content"] == text
