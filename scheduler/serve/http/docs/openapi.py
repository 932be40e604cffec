"""The OpenAPI 3.1 document, made of the routing table and the Structs it names.

The specification: https://spec.openapis.org/oas/v3.1.0
"""

import importlib.metadata
import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from scheduler.serve.http.docs.answered import ANSWERED
from scheduler.serve.http.docs.asked import default_of, field_of, place_of
from scheduler.serve.http.docs.examples import EXAMPLES, Example
from scheduler.serve.http.route import Route
from scheduler.serve.wire.errors import ErrorEnvelope

Json = dict[str, Any]

ANYWHERE = (401, 403, 500, 503)
"""What any route may refuse with: no key, a foreign page, a fault of ours, a model that is not there yet."""
WITH_A_BODY = (400, 408, 413, 415)

REFUSALS = {
    400: "The body cannot be answered as it is; `param` names the field.",
    401: "The server has API keys and the request has none of them.",
    403: "The request comes from a web page of a foreign origin, or names a host that is not this server's.",
    404: "There is no such thing: a model, a request.",
    408: "The body did not arrive in time.",
    413: "The body is larger than `--max-body`.",
    415: "The body has a `Content-Encoding`.",
    429: "The queue is full. `Retry-After` says when to try again.",
    500: "The server failed; its log says why.",
    501: "Not implemented.",
    503: "The model is loading, the server is shutting down, or too many connections are open.",
    504: "The request took longer than `--request-timeout`.",
}

_ABOUT = (
    "OpenAI's API as vLLM and llama-server extend it. In a request `null` is the same as nothing, and fields that are "
    'not listed are ignored. Every error is `{"error": {"message", "type", "param", "code"}}`.'
)

_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")


def openapi_document(routes: Sequence[Route]) -> Json:
    """The document that describes `routes`, as JSON values."""
    schemas, components = _schemas(routes)
    paths: dict[str, Json] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Lockstep",
            "version": importlib.metadata.version("lockstep-llm"),
            "summary": "An LLM inference server: every answer bit for bit the one it would have been alone.",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _schemas(routes: Sequence[Route]) -> tuple[dict[Any, Json], dict[str, Json]]:
    """The schema of each type the routes name, and the components those refer to, with what is written of them."""
    asked = _each(route.takes for route in routes)
    answered = _each(kind for route in routes for kind in (route.gives, *route.streams))
    answered = _each([*answered, ErrorEnvelope])
    template = "#/components/schemas/{name}"
    asked_schemas, asked_components = msgspec.json.schema_components(
        asked, schema_hook=_anything, ref_template=template
    )
    answered_schemas, answered_components = msgspec.json.schema_components(answered, ref_template=template)
    for name, component in asked_components.items():
        _describe_asked(name, component)
    for name, component in answered_components.items():
        _describe_answered(name, component)
    schemas = dict(zip([*asked, *answered], [*asked_schemas, *answered_schemas], strict=True))
    return schemas, asked_components | answered_components


def _each(kinds: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(kind for kind in kinds if kind is not None))


def _anything(_kind: type) -> Json:
    """The schema of a field declared as `object`: what it may be is written, not typed."""
    return {"description": ""}


def _describe_asked(name: str, component: Json) -> None:
    """Put what is written of a request's fields into its schema, in place of the Struct's word to its readers."""
    component.pop("description", None)
    for field, schema in component["properties"].items():
        schema.pop("default", None)
        found = field_of(name, field)
        if found is None:
            continue
        group, written = found
        if written.limits.keys() & {"type", "anyOf", "enum"}:
            schema.clear()
        schema.update(written.limits if written.required else _or_null(written.limits))
        schema["description"] = written.meaning
        schema["x-group"] = group
        default = default_of(name, field, written)
        if isinstance(default, str):
            schema["description"] += f" Default: {default}."
        elif default is not None:
            schema["default"] = default
        if written.required:
            component["required"].append(field)
    component["properties"] = dict(sorted(component["properties"].items(), key=lambda item: place_of(name, item[0])))


def _or_null(schema: Json) -> Json:
    """`schema` where null is as good as nothing, unless it does not speak of types."""
    if "type" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema


def _describe_answered(name: str, component: Json) -> None:
    """Say which fields an answer always has (those with a value of their own, too), and what they mean."""
    for field, schema in component["properties"].items():
        if "default" in schema and field not in component["required"]:
            component["required"].append(field)
        schema.pop("default", None)
        meaning = ANSWERED.get(f"{name}.{field}") or ANSWERED.get(field)
        if meaning is not None:
            schema["description"] = meaning


def _event(payloads: list[Json]) -> Json:
    """The schema of one server-sent event, whose data is one of `payloads` as JSON or, the last, `[DONE]`."""
    data = [
        {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": payloads}},
        {"const": "[DONE]"},
    ]
    return {"type": "object", "properties": {"data": {"anyOf": data}}, "required": ["data"]}


def _parameter(name: str, example: Example | None) -> Json:
    """A part of a path."""
    parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return parameter if example is None else {**parameter, "example": example.place}


def _operation(route: Route, path: str, schemas: dict[Any, Json]) -> Json:
    about, _, details = (route.handler.__doc__ or "").partition("\n\n")
    operation: Json = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", path)]),
        "summary": " ".join(about.split()),
    }
    if details:
        operation["description"] = " ".join(details.split())
    example = EXAMPLES.get(f"{route.method} {path}")
    if names := _PARAMETER.findall(route.path):
        operation["parameters"] = [_parameter(name, example) for name in names]
    if route.takes is not None:
        content: Json = {"schema": schemas[route.takes]}
        if example is not None:
            content["example"] = example.asked
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    operation["responses"] = {}
    if route.gives is not None:
        content = {"schema": schemas[route.gives]}
        if example is not None:
            content["example"] = example.answered
        media = {route.media_type: content}
        if route.streams:
            media["text/event-stream"] = {"schema": _event([schemas[kind] for kind in (*route.streams, ErrorEnvelope)])}
        operation["responses"]["200"] = {"description": "The answer.", "content": media}
    statuses = {*ANYWHERE, *route.refusals, *(WITH_A_BODY if route.takes is not None else ())}
    for status in sorted(statuses):
        operation["responses"][str(status)] = {
            "description": f"{HTTPStatus(status).phrase}. {REFUSALS[status]}",
            "content": {"application/json": {"schema": schemas[ErrorEnvelope]}},
        }
    return operation
