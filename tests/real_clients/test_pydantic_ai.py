"""An agent of pydantic-ai that answers in text: it needs no tools."""

import asyncio

import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

BRIEF = {"temperature": 0.0, "max_tokens": 6}


@pytest.fixture
def model(base_url):
    return OpenAIChatModel("smollm2-135m", provider=OpenAIProvider(base_url=base_url, api_key="unused"))


@pytest.fixture
def agent(model):
    return Agent(model, model_settings=BRIEF)


def test_a_run_answers_and_counts(agent, hello):
    result = agent.run_sync("Hi")
    assert result.output == hello
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.requests) == (31, 6, 1)


def test_a_streamed_run_is_the_same_text_and_counts_the_same(agent, hello):
    async def run():
        async with agent.run_stream("Hi") as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        return "".join(pieces), result.usage

    text, usage = asyncio.run(run())
    assert text == hello
    assert (usage.input_tokens, usage.output_tokens) == (31, 6)


def test_history_and_instructions_reach_the_template(model):
    agent = Agent(model, instructions="You answer in one word.", model_settings=BRIEF)
    first = agent.run_sync("Is water wet?")
    second = agent.run_sync("And ice?", message_history=first.all_messages())
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


@pytest.mark.parametrize(
    ("question", "settings", "param"), [("Hi", {"temperature": -1.0}, "temperature"), ("word " * 2000, {}, "messages")]
)
def test_a_refusal_is_a_model_http_error_with_the_servers_words(agent, question, settings, param):
    with pytest.raises(ModelHTTPError) as refused:
        agent.run_sync(question, model_settings=settings)
    assert refused.value.status_code == 400
    assert refused.value.body["param"] == param


def test_an_unknown_model_is_a_404(agent, base_url):
    provider = OpenAIProvider(base_url=base_url, api_key="unused")
    with pytest.raises(ModelHTTPError) as refused:
        agent.run_sync("Hi", model=OpenAIChatModel("gpt-7", provider=provider))
    assert refused.value.status_code == 404


@pytest.mark.usefixtures("ends_early")
def test_leaving_a_streamed_run_frees_the_slot(agent):
    async def run():
        async with agent.run_stream("Write a long story.", model_settings={"max_tokens": 900}) as result:
            async for piece in result.stream_text(delta=True, debounce_by=None):
                if piece:
                    await result.cancel()
                    break

    asyncio.run(run())
