"""A body's bytes to a validated Struct, or a refusal that says where the fault is.

msgspec decodes; what it leaves open is settled here: it answers deep nesting with a RecursionError, and says of NaN
and of a lone surrogate no more than that the JSON is malformed.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from scheduler.serve.wire.errors import ApiError, invalid
from scheduler.serve.wire.outline import outlines

T = TypeVar("T")

MAX_DEPTH = 64
MAX_ITEMS = 2**19
"""Items in all arrays and objects of a body: decoding is one call into C, and no other thread runs meanwhile."""
MAX_EXPLAINED = 2**16
"""Characters of a text that is read a second time, slowly, to name the parameter that is at fault."""
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The Struct in `body`. Raises `ApiError` 400, naming the parameter where there is one to name."""
    try:
        text = body.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise invalid(None, f"the body is not UTF-8: byte {error.start} cannot be decoded") from None
    if not text or text.isspace():
        raise invalid(None, "the body is empty; a JSON object is needed")
    for outline in outlines(body):
        if outline.depth > MAX_DEPTH:
            raise invalid(None, f"the body is nested more than {MAX_DEPTH} levels deep")
        if outline.commas >= MAX_ITEMS:
            raise invalid(None, f"the arrays and objects of the body have more than {MAX_ITEMS} items")
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except msgspec.DecodeError as error:
        raise (_malformed(text) if len(text) <= MAX_EXPLAINED else _malformed_somewhere(str(error))) from None


def _misfit(complaint: str) -> ApiError:
    """The refusal for msgspec's complaint about a value, with the top-level parameter it is in."""
    place = _PLACE.search(complaint)
    if place is None or not place["path"]:
        field = re.search(r"(?:missing required|unknown) field `(\w+)`", complaint)
        return invalid(field[1] if field else None, f"the body does not fit: {complaint.replace(' - at `$`', '')}")
    path = place["path"].replace("[...]", "")
    # Null is as good as no field at all, so it is no news that it may be null; and what is required may not.
    what = complaint[: place.start()].replace(" | null", "")
    return invalid(re.split(r"[.\[]", path)[0], f"{path}: {what[0].lower()}{what[1:]}")


def _malformed(text: str) -> ApiError:
    """What is wrong with a text that is not strict JSON, found with the standard library's more lenient reader."""
    try:
        value = json.loads(text, parse_int=float)
    except json.JSONDecodeError as error:
        return invalid(None, f"the body is not valid JSON: {error.msg[0].lower()}{error.msg[1:]}, at {error.pos}")
    for path, scalar in _scalars(value, ()):
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".") or "a name"
        param = str(path[0]) if path and isinstance(path[0], str) else None
        if isinstance(scalar, float) and not math.isfinite(scalar):
            return invalid(param, f"{name} must be a finite number")
        if isinstance(scalar, str) and not _is_encodable(scalar):
            return invalid(param, f"{name} is not Unicode text: half of a surrogate pair in it")
    return invalid(None, "the body is not valid JSON")


def _malformed_somewhere(complaint: str) -> ApiError:
    """The same from msgspec's complaint alone, which names the byte at most."""
    what = complaint.removeprefix("JSON is malformed: ")
    if what == complaint:  # says "truncated" of half a surrogate pair too
        what = "it ends too early, or a string in it has half of a surrogate pair"
    return invalid(None, f"the body is not valid JSON: {what}")


def _scalars(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every leaf of `value` and every key, each with the way to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield path, key
            yield from _scalars(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _scalars(item, (*path, index))
    else:
        yield path, value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
