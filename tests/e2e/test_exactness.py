"""What is served under load is, letter for letter, what `generate()` gives for each request alone."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.generate import Generation, generate
from engine.model import Model
from engine.params import SamplingParams
from tests.live_server import LiveServer, live_server

NUM_REQUESTS = 64
NUM_CLIENTS = 12
KV_DTYPE = "float16"

PROMPTS = (
    "Hi",
    "Once upon a time there was",
    "def fibonacci(n):\n    ",
    "The capital of France is",
    "Der Mond ist aufgegangen, die",
    "1, 2, 3, 4, 5,",
    "List three colours, one a line, each with an emoji: 🔴",
    "All happy families are alike; every unhappy family is unhappy in its own way. " * 2,
)

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.6, "min_p": 0.05},
    {"temperature": 0.9, "typical_p": 0.8},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 1.1, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.7},
    {"temperature": 1.0, "logit_bias": {"198": 4.0, "28": -100.0, "335": 2.5}},
    {"temperature": 1.0, "allowed_token_ids": [*range(200, 1200)]},
    {"temperature": 2.5},
)

ENDINGS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 4},
    {"max_tokens": 1},
    {"max_tokens": 6, "stop": [" the", "."]},
    {"max_tokens": 6, "stop": ["e"], "include_stop_str_in_output": True},
    {"max_tokens": 3, "ignore_eos": True},
    {"max_tokens": 5, "stop": ["\n", "a", "o"], "min_tokens": 2},
    {"max_tokens": 5, "stop_token_ids": [28, 30, 198, 260, 282]},
    {"max_tokens": 3, "skip_special_tokens": False},
)


class Call(NamedTuple):
    """A request as a client sends it: a chat if it has `messages`."""

    body: dict[str, Any]
    is_chat: bool
    is_streamed: bool


class Answer(NamedTuple):
    """What came back: each choice's text and finish reason, and the tokens counted."""

    choices: list[tuple[str, str]]
    num_prompt: int
    num_completion: int


def call(index: int) -> Call:
    """Request `index` of the mix: prompts, samplings and endings meet in ever new combinations."""
    rng = random.Random(index)
    prompt = rng.choice(PROMPTS)
    settings = {
        **SAMPLINGS[index % len(SAMPLINGS)],
        **ENDINGS[index // 2 % len(ENDINGS)],
        "seed": rng.choice((index, 2**40 + index, 2**63 - 1 - index)),
        "n": rng.choice((1, 1, 1, 1, 1, 1, 2, 3)),
    }
    is_chat = index % 2 == 0
    if is_chat:
        messages = [{"role": "user", "content": prompt}]
        if rng.random() < 0.15:
            messages += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "Go on!"}]
        return Call({"messages": messages, **settings}, is_chat, index % 4 < 2)
    return Call({"prompt": prompt, **settings}, is_chat, index % 4 < 2)


def served(server: LiveServer, asked: Call) -> Answer:
    path = "/v1/chat/completions" if asked.is_chat else "/v1/completions"
    n = asked.body["n"]
    if asked.is_streamed:
        stream = server.stream(path, {**asked.body, "stream_options": {"include_usage": True}})
        reasons = [stream.finish_reasons(index) for index in range(n)]
        assert all(len(reason) == 1 for reason in reasons)
        assert stream.usage is not None
        choices = [(stream.text(index), reasons[index][0]) for index in range(n)]
        return Answer(choices, stream.usage["prompt_tokens"], stream.usage["completion_tokens"])
    reply = server.post(path, asked.body)
    assert reply.status == 200, reply.body
    choices = [
        (choice["message"]["content"] if asked.is_chat else choice["text"], choice["finish_reason"])
        for choice in sorted(reply.json["choices"], key=lambda choice: choice["index"])
    ]
    assert len(choices) == n
    return Answer(choices, reply.json["usage"]["prompt_tokens"], reply.json["usage"]["completion_tokens"])


def alone(model: Model, asked: Call) -> Answer:
    """What `generate()` gives, one choice after the other."""
    given = {name: value for name, value in asked.body.items() if name not in {"messages", "prompt", "n"}}
    given["logit_bias"] = {int(token_id): bias for token_id, bias in given.get("logit_bias", {}).items()}
    params = SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    if asked.is_chat:
        assert model.chat_template is not None
        prompt_ids = model.chat_template.render(asked.body["messages"]).encode(model.tokenizer)
    else:
        prompt_ids = model.tokenizer.encode(asked.body["prompt"])
    answers: list[Generation] = [
        generate(model, model.tokenizer, prompt_ids, params, kv_dtype=KV_DTYPE, choice=choice)
        for choice in range(asked.body["n"])
    ]
    return Answer(
        [(answer.text, answer.finish_reason) for answer in answers],
        len(prompt_ids),
        sum(answer.stats.num_completion_tokens for answer in answers),
    )


@pytest.fixture(scope="module")
def busy_server(model_path: Path) -> Iterator[LiveServer]:
    """Fewer slots than clients, and chunks so short that prompts take several."""
    with live_server(model_path, "--slots", "8", "--prefill-chunk", "24", "--kv-dtype", KV_DTYPE) as server:
        yield server


def test_every_request_served_under_load_gets_the_answer_it_gets_alone(busy_server: LiveServer, model_path: Path):
    calls = [call(index) for index in range(NUM_REQUESTS)]
    model = Model.load(model_path)

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        in_company = [clients.submit(served, busy_server, asked) for asked in calls]
        expected = [alone(model, asked) for asked in calls]
        answers = [future.result() for future in in_company]

    for asked, answer, right in zip(calls, answers, expected, strict=True):
        assert answer == right, asked
    # The mix was what it is meant to be.
    everything = [choice for answer in answers for choice in answer.choices]
    assert {reason for _, reason in everything} == {"stop", "length"}
    assert len({text for text, _ in everything}) > NUM_REQUESTS / 2
    assert {asked.body["n"] for asked in calls} == {1, 2, 3}
    assert {(asked.is_chat, asked.is_streamed) for asked in calls} == {
        (c, s) for c in (True, False) for s in (True, False)
    }
