"""The official `openai` client against the real model."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from tests.live_server import LiveServer

MODEL = "smollm2-135m"
HI = [{"role": "user", "content": "Hi"}]
TOPICS = ["the sea", "a cat", "bread", "the moon", "trains", "winter", "a violin", "numbers"]


@pytest.fixture
async def client(server: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def streamed_text(client: openai.AsyncOpenAI, topic: str) -> str:
    messages = [{"role": "user", "content": f"Write about {topic}."}]
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_the_model_answers_a_question_it_knows(client):
    question = [{"role": "user", "content": "Tell me the capital of France."}]
    answer = await client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=16)
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL


async def test_usage_counts_the_templated_prompt_and_every_token(client):
    answer = await client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_tokens=3)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (31, 3, 34)
    assert answer.choices[0].finish_reason == "length"


async def test_a_stream_joined_is_the_plain_answer(client):
    asked = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 12}
    plain = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    *choices, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in choices) == plain.choices[0].message.content
    assert choices[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in choices if c.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage == plain.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_completions_go_on_from_text_and_from_token_ids_alike(client):
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 5}
    from_text = await client.completions.create(prompt="Hello", **asked)
    from_ids = await client.completions.create(prompt=[19556], **asked)
    assert from_text.choices[0].text == from_ids.choices[0].text
    assert from_ids.usage.prompt_tokens == 1


async def test_logprobs_carry_each_tokens_own_bytes(client):
    answer = await client.chat.completions.create(
        model=MODEL, messages=HI, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 5
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == answer.choices[0].message.content
    assert all(token.top_logprobs[0].token == token.token for token in tokens)
    assert all(token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob for token in tokens)


async def test_a_seed_makes_a_sampled_answer_repeatable(client):
    asked = {"model": MODEL, "messages": HI, "temperature": 1.0, "max_tokens": 12}
    first, again, other = [await client.chat.completions.create(**asked, seed=seed) for seed in (5, 5, 6)]
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.system_fingerprint == again.system_fingerprint
    assert first.choices[0].message.content != other.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_parameter_is_the_clients_own_exception_before_any_text(client, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=HI, temperature=-1, stream=stream)
    assert refused.value.status_code == 400
    assert refused.value.param == "temperature"


async def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model="gpt-7", messages=HI)
    assert refused.value.code == "model_not_found"


async def test_a_prompt_longer_than_the_context_is_refused_by_its_code(client):
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=[19556] * 5000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"


async def test_the_model_is_listed(client):
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_an_aborted_stream_frees_its_slot(client, server):
    aborted = server.metric("vllm:request_success_total")
    stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, max_tokens=2000)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await asyncio.to_thread(server.wait_until_idle)
    assert server.metric("vllm:request_success_total") == aborted + 1


async def test_eight_clients_at_once_each_get_the_answer_they_would_get_alone(client, server):
    alone = [await streamed_text(client, topic) for topic in TOPICS]
    together = await asyncio.gather(*[streamed_text(client, topic) for topic in TOPICS])
    assert together == alone
    assert len(set(alone)) == len(alone)
    await asyncio.to_thread(server.wait_until_idle)
