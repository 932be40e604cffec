"""The prompt of /v1/completions: a text, texts, token ids, or lists of token ids.

msgspec knows no union of several array types, so the shapes are told apart here.
"""

from typing import Any

from scheduler.serve.wire.errors import invalid

Prompt = str | list[int]

MAX_PROMPTS = 256
MAX_CALL_CHOICES = 1024
"""Of all prompts of a call together: each costs some time of the event loop when it comes and when it goes."""


def prompts_of(value: Any) -> list[Prompt]:
    """Every prompt in the field's decoded JSON `value`, in order. Raises `ApiError` naming `prompt` and the place."""
    if value is None:
        raise invalid("prompt", "prompt is required: a string, strings, token ids, or lists of token ids")
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if not isinstance(value, list):
        raise invalid("prompt", "prompt must be a string, strings, token ids, or lists of token ids")
    if not value:
        raise invalid("prompt", "prompt must not be empty")
    if not isinstance(value[0], str | list):
        return [_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt may hold {MAX_PROMPTS} prompts, got {len(value)}")
    are_texts = isinstance(value[0], str)
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        place = f"prompt[{index}]"
        if are_texts and isinstance(item, str):
            prompts.append(_text(item, place))
        elif not are_texts and isinstance(item, list):
            prompts.append(_ids(item, place))
        else:
            raise invalid("prompt", f"{place}: all prompts must be of one kind")
    return prompts


def check_num_choices(num_prompts: int, n: int) -> None:
    """Raise `ApiError` naming `n` if so many answers to each of so many prompts are too many for one call."""
    if num_prompts * n > MAX_CALL_CHOICES:
        message = f"n times the number of prompts must be <= {MAX_CALL_CHOICES}, got {n} x {num_prompts}"
        raise invalid("n", message)


def _text(value: str, place: str) -> str:
    if not value:
        raise invalid("prompt", f"{place} must not be empty")
    return value


def _ids(value: list[Any], place: str) -> list[int]:
    if not value:
        raise invalid("prompt", f"{place} must not be empty")
    return ids_of_json(value, place)


def ids_of_json(value: Any, place: str) -> list[int]:
    """`value` as a list of integers. Raises `ApiError` naming the place; whether each is a token is not looked at."""
    param = place.partition("[")[0]
    if not isinstance(value, list):
        raise invalid(param, f"{place} must be a list of token ids")
    for index, item in enumerate(value):
        # bool is a subclass of int, and `true` is no token.
        if type(item) is not int:
            raise invalid(param, f"{place}[{index}] must be a token id, an integer")
    return value
