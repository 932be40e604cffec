"""The OpenAPI document says what the server does: its paths, its fields, its limits and its answers."""

import asyncio
import re

import msgspec
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from scheduler.serve.http.docs.asked import field_of
from scheduler.serve.http.docs.examples import EXAMPLES
from scheduler.serve.http.docs.openapi import openapi_document
from scheduler.serve.http.routes import routing_table
from tests.fakes import FakeBackend
from tests.scheduler.serve.rig import chat_body, streamed, until

DOCUMENT = openapi_document(routing_table())
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES = {
    path: operation["requestBody"]["content"]["application/json"]
    for path, item in DOCUMENT["paths"].items()
    for operation in item.values()
    if "requestBody" in operation
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def fields_of(schema):
    return SCHEMAS[schema["$ref"].rpartition("/")[2]]["properties"]


def limits():
    """Every numeric limit of a field: the path, the field, a value that is just right and one that is too much."""
    for path, body in BODIES.items():
        for name, schema in fields_of(body["schema"]).items():
            step = 0.25 if {"type": "number"} in schema.get("anyOf", []) else 1
            for key, beyond in (("minimum", -step), ("maximum", step)):
                if key in schema:
                    yield path, name, schema[key], schema[key] + beyond
            if "exclusiveMinimum" in schema:
                yield path, name, schema["exclusiveMinimum"] + step, schema["exclusiveMinimum"]


def lists():
    """Every limit of a list's length or a text's: the path, the field, a value that is just right and one beyond."""
    for path, body in BODIES.items():
        for name, schema in fields_of(body["schema"]).items():
            for kind in schema.get("anyOf", [schema]):
                if "maxItems" in kind:
                    item = [1] if kind["items"].get("type") == "array" else "a"
                    yield path, name, [item] * kind["maxItems"], [item] * (kind["maxItems"] + 1)
                if kind.get("minItems", schema.get("minItems")) == 1 and kind.get("type") == "array":
                    item = (
                        [1]
                        if kind["items"].get("type") == "array"
                        else 1
                        if kind["items"]["type"] == "integer"
                        else "a"
                    )
                    if kind["items"]["type"] != "object":
                        yield path, name, [item], []
            for value in schema.get("enum", []):
                yield path, name, value, {"something": "else"}


def calls():
    """Calls whose answers have all there is in them."""
    everything = {"max_tokens": 3, "n": 2, "return_token_ids": True, "seed": 1, "temperature": 1.5}
    chat = chat_body(**everything, logprobs=True, top_logprobs=2)
    completion = {"prompt": ["Hi", "Ho"], **everything, "logprobs": 2}
    usage = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return [
        (CHAT, chat_body(max_tokens=2)),
        (CHAT, {**chat, "prompt_logprobs": 2}),
        (CHAT, {**chat, "stop": ["a", "e", "i", "o", " "]}),
        (CHAT, {**chat, **usage}),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 2}),
        (COMPLETIONS, {"prompt": [1, 2], "max_tokens": 0, "echo": True, "logprobs": 1}),
        (COMPLETIONS, {**completion, "prompt_logprobs": 0, "echo": True}),
        (COMPLETIONS, {**completion, **usage}),
        (CHAT, {**chat, **usage, "prompt_logprobs": 1, "return_progress": True, "timings_per_token": True}),
        (COMPLETIONS, {**completion, **usage, "prompt_logprobs": 1, "echo": True, "return_progress": True}),
        (f"{CHAT}/render", chat),
        ("/completion", {"prompt": "Hi", "n_predict": 3, "n_probs": 2, "return_tokens": True}),
        ("/completion", {"prompt": [1, 2], "n_predict": 3, "n_probs": 1, "stream": True, "return_progress": True}),
        ("/apply-template", chat_body()),
        ("/tokenize", {"content": "H\u00e9", "with_pieces": True}),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 2, "stream": True, "echo": True}),
        ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
        ("/tokenize", chat_body()),
        ("/detokenize", {"tokens": [72, 105]}),
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


def check_conforms(value, schema):
    document = {**schema, "components": {"schemas": closed(SCHEMAS)}}
    errors = [f"{error.json_path}: {error.message}" for error in OAS31Validator(document).iter_errors(value)]
    assert errors == [], value


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


@pytest.mark.parametrize(("path", "field", "right", "wrong"), list(limits()))
async def test_limits_are_the_documented_ones(server, path, field, right, wrong):
    body = {**BODIES[path]["example"], "n": 1, "max_tokens": 1, "logprobs": True if path.startswith(CHAT) else 1}
    assert (await server.post(path, {**body, field: right})).status == 200
    (await server.post(path, {**body, field: wrong})).refused(400, field)


@pytest.mark.parametrize(("path", "field", "right", "wrong"), list(lists()))
async def test_lists_may_be_as_long_as_documented(serve, path, field, right, wrong):
    server = await serve(max_queue=256)
    body = {**BODIES[path]["example"], "max_tokens": 1}
    reply = await server.post(path, {**body, field: right})
    assert reply.status == 200, reply.body
    (await server.post(path, {**body, field: wrong})).refused(400, field)


@pytest.mark.parametrize(("path", "body"), calls())
async def test_answers_have_what_is_documented_and_nothing_else(server, path, body):
    reply = await server.post(path, body)
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    if body.get("stream"):
        for chunk in streamed(reply, has_done=path != "/completion").chunks:
            check_conforms(chunk, content["text/event-stream"]["x-event"])
    else:
        check_conforms(reply.json, content["application/json"]["schema"])


@pytest.mark.parametrize("path", list(EXAMPLES))
async def test_examples_look_like_what_the_server_answers(serve, path):
    server = await serve(FakeBackend(delay_s=0.005))
    running = []
    if "{id}" in path:
        running.append(asyncio.create_task(server.complete(request_id="running")))
        await until(lambda: server.engine.num_running == 1)
    example = EXAMPLES[path]
    url = path.replace("{name}", "fake").replace("{id}", "running")
    reply = await (server.get(url) if example.asked is None else server.post(url, example.asked))
    assert reply.status == 200, reply.body
    assert shape(reply.json) == shape(example.answered)
    await server.request("DELETE", "/v1/requests/running")
    await asyncio.gather(*running)


def test_every_path_with_a_json_answer_has_an_example():
    with_json = {
        path
        for path, item in DOCUMENT["paths"].items()
        for operation in item.values()
        if "application/json" in operation["responses"].get("200", {}).get("content", {})
    }
    assert with_json - EXAMPLES.keys() == {"/openapi.json"}
