"""instructor, in the mode that needs no tools: the schema stands in the prompt, the answer is parsed from the text."""

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel, field_validator

MODEL = "smollm2-135m"


class City(BaseModel):
    name: str


class Elsewhere(City):
    @field_validator("name")
    @classmethod
    def is_not_paris(cls, name):
        assert name != "Paris", "any city but Paris"
        return name


def example(country, capital):
    """A model this small copies the schema unless it is shown an answer or two."""
    return [
        {"role": "user", "content": f"The capital of {country}?"},
        {"role": "assistant", "content": f'```json\n{{"name": "{capital}"}}\n```'},
    ]


QUESTION = [
    *example("Italy", "Rome"),
    *example("Spain", "Madrid"),
    {"role": "user", "content": "The capital of France?"},
]
BRIEF = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 40, "max_retries": 0}


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield instructor.from_openai(client, mode=instructor.Mode.MD_JSON)


def test_an_answer_becomes_the_structure_asked_for_and_is_counted(client):
    city, completion = client.create_with_completion(response_model=City, **BRIEF)
    assert city.name == "Paris"
    usage = completion.usage
    assert 0 < usage.completion_tokens < usage.prompt_tokens < usage.total_tokens


def test_a_streamed_answer_becomes_the_same_structure(client):
    *_, last = client.create_partial(response_model=City, **BRIEF)
    assert last.name == "Paris"


def test_an_answer_that_does_not_fit_is_asked_for_again_in_the_same_conversation(client):
    with pytest.raises(InstructorRetryException) as given_up:
        client.create(response_model=Elsewhere, **BRIEF | {"max_retries": 1})
    first, second = given_up.value.failed_attempts
    assert "any city but Paris" in str(first.exception)
    assert second.completion.usage.prompt_tokens > first.completion.usage.prompt_tokens


def test_a_refusal_is_told_in_the_servers_words(client):
    with pytest.raises(InstructorRetryException, match="temperature must be"):
        client.create(response_model=City, **BRIEF | {"temperature": -1})


@pytest.mark.usefixtures("ends_early")
def test_giving_up_waiting_frees_the_slot(client):
    asked = BRIEF | {"max_tokens": 600, "extra_body": {"ignore_eos": True}, "timeout": 1.0}
    with pytest.raises(InstructorRetryException, match="timed out"):
        client.create(response_model=City, **asked)
