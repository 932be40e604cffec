"""The official `openai` client as a program without asyncio uses it (tests/e2e has its asynchronous twin)."""

import openai
import pytest

MODEL = "smollm2-135m"
HI = [{"role": "user", "content": "Hi"}]
BRIEF = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 6}


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


def test_a_plain_answer_is_the_one_bare_http_gets(client, hello):
    answer = client.chat.completions.create(**BRIEF)
    assert answer.choices[0].message.content == hello
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (31, 6, 37)


def test_a_stream_is_the_same_text_and_counts_the_same(client, hello):
    *chunks, last = client.chat.completions.create(**BRIEF, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == hello
    assert last.usage == client.chat.completions.create(**BRIEF).usage


def test_the_stream_helper_assembles_the_same_answer(client):
    asked = BRIEF | {"max_tokens": 20}
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    plain = client.chat.completions.create(**asked)
    assert final.choices[0].message.content == plain.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_completions_echo_and_score_the_prompt(client):
    answer = client.completions.create(
        model=MODEL, prompt="Hello", temperature=0, max_tokens=2, echo=True, logprobs=1, n=2
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.text.startswith("Hello")
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs[0] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_parameter_raises_before_any_text(client, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**BRIEF | {"temperature": -1}, stream=stream)
    assert refused.value.param == "temperature"
    assert refused.value.type == "invalid_request_error"


def test_an_unknown_model_raises_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-7")
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.usefixtures("ends_early")
def test_an_aborted_stream_frees_its_slot(client):
    with client.chat.completions.create(**BRIEF | {"max_tokens": 900}, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break


@pytest.mark.usefixtures("ends_early")
def test_a_client_that_gives_up_waiting_frees_its_slot(client):
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=900, extra_body={"ignore_eos": True}, timeout=1.0
        )


def test_extras_of_vllm_pass_in_the_extra_body(client):
    asked = BRIEF | {"extra_body": {"top_k": 1, "min_tokens": 3, "repetition_penalty": 1.1, "return_token_ids": False}}
    assert client.chat.completions.create(**asked).usage.completion_tokens == 6
