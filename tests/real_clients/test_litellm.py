"""litellm, which knows Lockstep as any OpenAI-like server and as vLLM."""

import litellm
import pytest

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def settings(request, base_url):
    return {"model": f"{request.param}/smollm2-135m", "api_base": base_url, "api_key": "unused", "num_retries": 0}


@pytest.fixture
def brief(settings):
    return settings | {"messages": HI, "temperature": 0, "max_tokens": 6}


def test_completion_answers_and_counts(brief, hello):
    answer = litellm.completion(**brief)
    assert answer.choices[0].message.content == hello
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (31, 6)


def test_a_stream_is_the_same_text_and_counts_the_same(brief, hello):
    chunks = list(litellm.completion(**brief, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == hello
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].total_tokens == 37


def test_a_refusal_is_litellms_bad_request(brief):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**brief | {"temperature": -1})


def test_too_long_a_prompt_is_told_from_other_refusals(brief):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**brief | {"messages": [{"role": "user", "content": "word " * 3000}]})


def test_an_unknown_model_is_litellms_not_found(brief):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**brief | {"model": brief["model"].replace("smollm2-135m", "gpt-7")})


@pytest.mark.usefixtures("ends_early")
def test_leaving_a_stream_frees_the_slot(brief):
    stream = litellm.completion(**brief | {"max_tokens": 900}, stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.completion_stream.close()
