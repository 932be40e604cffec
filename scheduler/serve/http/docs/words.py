"""JSON Schema in few words: the type of a value, and what it may be."""

import json
from typing import Any

Schema = dict[str, Any]


def type_words(schema: Schema) -> str:
    """The type of what `schema` describes."""
    if "$ref" in schema:
        return component_name(schema)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_words(kind) for kind in schema["anyOf"]))
    match schema.get("type"):
        case "array":
            return f"list of {_many(schema.get('items', {}))}"
        case "object" if "$ref" in schema.get("additionalProperties", {}):
            return f"object of {component_name(schema['additionalProperties'])}"
        case str(name):
            return name
        case _:
            return ""


def asked_type_words(schema: Schema) -> str:
    """The same for a field of a request, where null is not worth a word: it is the same as nothing."""
    return type_words(schema).removesuffix(" or null")


def _many(schema: Schema) -> str:
    one = type_words(schema)
    return f"({one})" if " or " in one else f"{one}s" if one in _COUNTABLE else one


_COUNTABLE = {"string", "integer", "number", "object", "boolean"}


def component_name(schema: Schema) -> str:
    """The component a reference names."""
    return str(schema["$ref"]).rpartition("/")[2]


def limit_words(schema: Schema) -> str:
    """What a value may be beyond its type, empty if anything."""
    if "enum" in schema:
        return "only " + ", ".join(_json(value) for value in schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{low} to {high}"
    if low is not None:
        return f"at least {low}"
    if "exclusiveMinimum" in schema:
        return f"more than {schema['exclusiveMinimum']}"
    kinds = [*schema.get("anyOf", []), schema]
    if (longest := max((kind.get("maxItems", 0) for kind in kinds), default=0)) > 0:
        return f"at most {longest}"
    if "pattern" in schema:
        return "1 to 128 letters, digits, `-`, `_`, `.`, `:`"
    for kind in kinds:
        if isinstance(values := kind.get("additionalProperties"), dict) and "minimum" in values:
            return f"{values['minimum']} to {values['maximum']}"
    return "not empty" if any(kind.get("minItems") or kind.get("minLength") for kind in kinds) else ""


def default_words(schema: Schema) -> str:
    """The default in `schema`, empty if there is none."""
    return _json(schema["default"]) if "default" in schema else ""


def _json(value: Any) -> str:

    return f"`{json.dumps(value)}`"
