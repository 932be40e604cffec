"""`ChatOpenAI` and `OpenAI` of langchain-openai."""

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

MODEL = "smollm2-135m"


@pytest.fixture
def settings(base_url):
    return {"base_url": base_url, "api_key": "unused", "model": MODEL, "max_retries": 0, "temperature": 0}


@pytest.fixture
def chat(settings):
    return ChatOpenAI(**settings, max_tokens=6, stream_usage=True)


def test_invoke_answers_and_counts(chat, hello):
    answer = chat.invoke("Hi")
    assert answer.content == hello
    assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == (31, 6)
    assert answer.response_metadata["finish_reason"] == "length"


def test_stream_joins_to_the_same_message_and_usage(chat, hello):
    first, *others = chat.stream("Hi")
    whole = first
    for chunk in others:
        whole += chunk
    assert whole.content == hello
    assert whole.usage_metadata["total_tokens"] == 37


def test_a_batch_of_questions_gets_each_its_own_answer(chat):
    questions = ["Hi", "Name a colour.", "What is 2 + 2?"]
    assert [m.content for m in chat.batch(questions)] == [chat.invoke(question).content for question in questions]


def test_a_chain_of_roles_reaches_the_template(chat):
    prompt = ChatPromptTemplate.from_messages([("system", "You answer in one word."), ("human", "{question}")])
    chained = (prompt | chat).invoke({"question": "Is water wet?"})
    messages = [SystemMessage("You answer in one word."), HumanMessage("Is water wet?")]
    assert chained.content == chat.invoke(messages).content
    assert chat.invoke([*messages, AIMessage("Yes"), HumanMessage("And ice?")]).content


def test_completions_go_on_from_text(settings):
    assert OpenAI(**settings, max_tokens=4).invoke("The capital of France is").strip()


def test_a_refusal_is_openais_own_exception(settings):
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        ChatOpenAI(**settings, presence_penalty=7).invoke("Hi")
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**settings | {"model": "gpt-7"}).invoke("Hi")


def test_too_long_a_prompt_is_told_from_other_refusals(settings):
    with pytest.raises(ContextOverflowError) as refused:
        ChatOpenAI(**settings).invoke("word " * 2000)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.usefixtures("ends_early")
def test_leaving_a_stream_frees_the_slot(settings):
    stream = ChatOpenAI(**settings, max_tokens=900).stream("Write a long story.")
    while not next(stream).content:
        pass
    stream.close()
