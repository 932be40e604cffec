"""JSON Schema in few words: the type of a value, and what it may be."""

import json
from typing import Any

Schema = dict[str, Any]


def type_words(schema: Schema) -> str:
    """The type of what `schema` describes."""
    if "$ref" in schema:
        return component_name(schema)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(filter(None, map(type_words, schema["anyOf"]))))
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
    words = dict.fromkeys(_own_limit(kind) for kind in (*schema.get("anyOf", ()), schema))
    said = [word for word in words if word]
    if len(said) > 1 and NOT_EMPTY in said:
        said.remove(NOT_EMPTY)
    return " or ".join(said)


def _own_limit(schema: Schema) -> str:
    match schema:
        case {"enum": [None]}:
            return "only `null`"
        case {"enum": [None, *values]} | {"enum": values}:
            return "only " + ", ".join(map(_json, values))
        case {"const": value}:
            return str(value)
        case {"minimum": low, "maximum": high} if low == high:
            return f"only {low}"
        case {"minimum": low, "maximum": high}:
            return "" if low <= -(2**63) else f"{low} to {high}"
        case {"minimum": low}:
            return f"at least {low}"
        case {"exclusiveMinimum": low}:
            return f"more than {low}"
        case {"maxItems": most} | {"maxProperties": most}:
            return f"at most {most}"
        case {"maxLength": 0}:
            return "only empty"
        case {"pattern": _}:
            return "1 to 128 letters, digits, `-`, `_`, `.`, `:`"
        case {"minItems": 1} | {"minLength": 1}:
            return NOT_EMPTY
    return ""


NOT_EMPTY = "not empty"


def default_words(schema: Schema) -> str:
    """The default in `schema`, empty if there is none."""
    return _json(schema["default"]) if "default" in schema else ""


def _json(value: Any) -> str:

    return f"`{json.dumps(value)}`"
