"""What a stream looks like from outside: framing, roles, usage, indexes, errors."""

import pytest

from tests.live_server import LiveServer


@pytest.mark.parametrize(
    ("options", "expects_usage"),
    [
        ({}, False),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": None}, False),
    ],
)
def test_01_a_usage_chunk_without_choices_comes_only_when_asked_for(server: LiveServer, options, expects_usage):
    stream = server.stream_chat("Hi", max_tokens=3, **options)
    empty = [chunk for chunk in stream.chunks if chunk["choices"] == []]
    usages = [chunk for chunk in stream.chunks if chunk.get("usage") is not None]
    if expects_usage:
        assert empty == usages == stream.chunks[-1:]
        usage = stream.usage
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (31, 3, 34)
    else:
        assert empty == usages == []
    assert stream.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len(stream.finish_reasons()) == 1
    for key in ("id", "created", "model"):
        assert len({chunk[key] for chunk in stream.chunks}) == 1


def test_01_stream_options_without_stream_are_refused(server: LiveServer):
    server.chat("Hi", max_tokens=1, stream_options={"include_usage": True}).refused(param="stream_options")


def test_19_each_choice_of_a_stream_has_one_role_one_finish_and_its_own_index(server: LiveServer):
    body = {"n": 3, "max_tokens": 4, "temperature": 1.2, "seed": 5, "stream_options": {"include_usage": True}}
    stream = server.stream_chat("Hi", **body)
    for index in range(3):
        roles = [
            choice["delta"]["role"]
            for chunk in stream.chunks
            for choice in chunk["choices"]
            if choice["index"] == index and choice["delta"].get("role")
        ]
        assert roles == ["assistant"]
        assert len(stream.finish_reasons(index)) == 1
    assert stream.usage["prompt_tokens"] == 31
    assert stream.usage["completion_tokens"] <= 12
    texts = [stream.text(index) for index in range(3)]
    assert len(set(texts)) > 1
    again = server.stream_chat("Hi", **body)
    assert [again.text(index) for index in range(3)] == texts
    plain = server.chat("Hi", **{key: value for key, value in body.items() if key != "stream_options"}).json
    assert [choice["message"]["content"] for choice in plain["choices"]] == texts


def test_19_more_choices_than_slots_are_all_answered(server: LiveServer):
    reply = server.chat("Hi", n=9, max_tokens=3, temperature=1.0, seed=1).json
    assert [choice["index"] for choice in reply["choices"]] == list(range(9))
    assert reply["usage"]["prompt_tokens"] == 31


def test_s03_and_s19_a_batch_of_prompts_with_n_is_answered_prompt_by_prompt(server: LiveServer):
    prompts = ["red is a", "two plus", "cat and"]
    reply = server.complete(prompts, n=2, echo=True, max_tokens=4, temperature=0.8, seed=3).json
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for choice in reply["choices"]:
        assert choice["text"].startswith(prompts[choice["index"] // 2])
    assert reply["usage"]["prompt_tokens"] == 7
    stream = server.stream_completion(prompts, n=2, echo=True, max_tokens=4, temperature=0.8, seed=3)
    assert [stream.text(index) for index in range(6)] == [choice["text"] for choice in reply["choices"]]


def test_s11_pings_are_comments_and_nothing_else(server: LiveServer, model_path):
    from tests.live_server import live_server

    with live_server(model_path, "--slots", "1", "--sse-ping", "0.02") as pinging:
        stream = pinging.stream_chat("Write a story.", max_tokens=40, temperature=0)
    assert stream.comments
    assert stream.text() == server.stream_chat("Write a story.", max_tokens=40, temperature=0).text()
