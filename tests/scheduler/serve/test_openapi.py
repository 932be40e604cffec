"""The OpenAPI document says what the server does: its paths, its fields, its limits and its answers."""

import asyncio
import json
import re

import msgspec
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from scheduler.serve.http.docs.answered import ANSWERED
from scheduler.serve.http.docs.asked import WRITTEN, field_of
from scheduler.serve.http.docs.examples import EXAMPLES
from scheduler.serve.http.docs.openapi import openapi_document
from scheduler.serve.http.routes import routing_table
from scheduler.serve.wire.prompt import MAX_PROMPTS
from tests.fakes import FakeBackend
from tests.scheduler.serve.rig import chat_body, until

DOCUMENT = openapi_document(routing_table())
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
}
BODIES = {
    name: operation["requestBody"]["content"]["application/json"]
    for name, operation in OPERATIONS.items()
    if "requestBody" in operation
}
CHAT, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"
COMPLETION = "POST /completion"


def fields_of(schema):
    return SCHEMAS[schema["$ref"].rpartition("/")[2]]["properties"]


def numbers(schema):
    """Every limit of a number: a value that is just right and one that is too much."""
    step = 0.25 if {"type": "number"} in schema.get("anyOf", []) else 1
    for kind in (schema, *schema.get("anyOf", [])):
        if kind.get("minimum", -(2**63)) > -(2**63):
            beyond = kind["minimum"] - step
            yield kind["minimum"], beyond - step if {"const": beyond} in schema.get("anyOf", []) else beyond
        if kind.get("maximum", 2**63 - 1) < 2**63 - 1:
            yield kind["maximum"], kind["maximum"] + step
        if "exclusiveMinimum" in kind:
            yield kind["exclusiveMinimum"] + step, kind["exclusiveMinimum"]


def sizes(schema):
    """Every limit of a size, and every value that asks for nothing: one that is just right and one that is not."""
    for kind in (schema, *schema.get("anyOf", [])):
        if kind.get("type") == "array":
            item = {"array": [1] * kind["items"].get("minItems", 1), "integer": 1, "string": "a", "object": None}[
                kind["items"]["type"]
            ]
            most, least = (kind.get(key, schema.get(key)) for key in ("maxItems", "minItems"))
            if most is not None:
                yield [item] * most, [item] * (most + 1)
            if least is not None and item is not None:
                yield [item] * least, []
        if kind.get("type") == "string" and "maxLength" in (limits := {**schema, **kind}):
            yield "a" * limits["maxLength"], "a" * (limits["maxLength"] + 1)
        if "maxProperties" in kind:
            yield {}, {str(token_id): 1 for token_id in range(kind["maxProperties"] + 1)}
    for value in schema.get("enum", []):
        yield value, {"something": "else"}


def calls():
    """Calls whose answers have all there is in them."""
    everything = {"max_tokens": 3, "n": 2, "return_token_ids": True, "seed": 1, "temperature": 1.5}
    chat = chat_body(**everything, logprobs=True, top_logprobs=2)
    completion = {"prompt": ["Hi", "Ho"], **everything, "logprobs": 2}
    progress = {"stream": True, "return_progress": True, "timings_per_token": True}
    usage = {**progress, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return [
        (CHAT, chat_body(max_tokens=2)),
        (CHAT, {**chat, "prompt_logprobs": 2}),
        (CHAT, {**chat, "stop": ["a", "e", "i", "o", " "]}),
        (CHAT, {**chat, **usage}),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}),
        (COMPLETIONS, {"prompt": [1, 2], "max_tokens": 0, "echo": True, "logprobs": 1}),
        (COMPLETIONS, {**completion, "prompt_logprobs": 0, "echo": True}),
        (COMPLETIONS, {**completion, **usage}),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 2, "stream": True, "echo": True}),
        (COMPLETION, {"prompt": "Hi", "n_predict": 3, "n_probs": 2, "return_tokens": True}),
        (COMPLETION, {"prompt": "Hi", "n_predict": 3, "n_probs": 2, **progress}),
        ("POST /tokenize", {"prompt": "Hi", "return_token_strs": True}),
        ("POST /tokenize", {"content": "Hi é", "with_pieces": True}),
        ("POST /tokenize", chat_body()),
        ("POST /detokenize", {"tokens": [72, 105]}),
        ("POST /apply-template", chat_body()),
        ("POST /v1/chat/completions/render", chat_body()),
    ]


def shape(value):
    """The names and the kinds of values in a JSON value, without the values themselves."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return "number" if type(value) in (int, float) else type(value).__name__


def closed(schema):
    """`schema` in which nothing may be that it does not name."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {key: closed(item) for key, item in schema.items()}
    if shut.get("type") == "object" and "properties" in shut and "additionalProperties" not in shut:
        shut["additionalProperties"] = False
    return shut


CLOSED = {"components": {"schemas": closed(SCHEMAS)}}


def check_conforms(value, schema):
    document = {**schema, **CLOSED}
    errors = [f"{error.json_path}: {error.message}" for error in OAS31Validator(document).iter_errors(value)]
    assert errors == [], value


@pytest.mark.slow
def test_it_is_valid_openapi_3_1():
    assert list(OpenAPIV31SpecValidator(DOCUMENT).iter_errors()) == []


def test_it_names_every_route():
    named = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert named == {(route.method, re.sub(r":[^}]*", "", route.path)) for route in routing_table()}


@pytest.mark.parametrize("route", routing_table(), ids=lambda route: f"{route.method} {route.path}")
def test_every_route_says_what_it_answers(route):
    assert re.match(r"[A-Z][^/]+\.", route.handler.__doc__), "a sentence, without the path: that is in the table"


@pytest.mark.parametrize(
    "struct",
    sorted({route.takes for route in routing_table()} - {None}, key=lambda s: s.__name__),
    ids=lambda s: s.__name__,
)
def test_every_field_of_a_request_is_explained(struct):
    names = [field.encode_name for field in msgspec.structs.fields(struct)]
    assert [name for name in names if field_of(struct.__name__, name) is None] == []


async def test_the_server_gives_it_away(server):
    reply = await server.get("/openapi.json")
    assert reply.json == DOCUMENT


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("limits", [numbers, sizes])
async def test_limits_are_the_documented_ones(serve, name, limits):
    server = await serve(max_queue=MAX_PROMPTS)
    path = name.removeprefix("POST ")
    body = {"max_tokens": 1, **BODIES[name]["example"], "logprobs": True if "chat" in name else 1}
    for field, schema in fields_of(BODIES[name]["schema"]).items():
        for right, wrong in limits(schema):
            reply = await server.post(path, {**body, field: right})
            assert reply.status == 200, (field, right, reply.body)
            (await server.post(path, {**body, field: wrong})).refused(400, field)


@pytest.mark.parametrize(("name", "body"), calls())
async def test_answers_have_what_is_documented_and_nothing_else(server, name, body):
    reply = await server.post(name.removeprefix("POST "), body)
    content = OPERATIONS[name]["responses"]["200"]["content"]
    if body.get("stream"):
        chunks = [json.loads(event) for event in re.findall(rb"^data: ({.*})$", reply.body, flags=re.MULTILINE)]
        assert len(chunks) > 2, reply.body
        payload, _ = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
        for chunk in chunks:
            assert "error" not in chunk
            check_conforms(chunk, payload["contentSchema"])
    else:
        check_conforms(reply.json, content["application/json"]["schema"])


@pytest.mark.parametrize("name", EXAMPLES)
async def test_examples_look_like_what_the_server_answers(serve, name):
    server = await serve(FakeBackend(delay_s=0.01))
    running = asyncio.create_task(server.complete("Hi", max_tokens=200, request_id="story"))
    await until(lambda: server.engine.num_running == 1)
    method, _, path = name.partition(" ")
    example = EXAMPLES[name]
    body = None if example.asked is None else json.dumps(example.asked).encode()
    reply = await server.request(method, path.format(name="fake", id="story"), body)
    assert reply.status == 200, reply.body
    assert shape(reply.json) == shape(example.answered)
    running.cancel()


def test_every_json_answer_has_an_example():
    with_json = {
        name
        for name, operation in OPERATIONS.items()
        if "application/json" in operation["responses"].get("200", {}).get("content", {})
    }
    assert with_json - EXAMPLES.keys() == {"GET /openapi.json"}


def test_nothing_is_explained_that_is_not_there():
    there = {
        key for name, schema in SCHEMAS.items() for field in schema["properties"] for key in (field, f"{name}.{field}")
    }
    assert [key for key in [*WRITTEN, *ANSWERED] if key not in there] == []
