"""Bodies to Structs: whatever comes in, a Struct or a refusal comes out."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.serve.wire import decode as decoding
from scheduler.serve.wire import outline as outlining
from scheduler.serve.wire.chat import ChatRequest
from scheduler.serve.wire.completions import CompletionRequest
from scheduler.serve.wire.decode import MAX_DEPTH, MAX_EXPLAINED, MAX_ITEMS, decode
from scheduler.serve.wire.encode import encode_json
from scheduler.serve.wire.errors import ApiError
from scheduler.serve.wire.outline import outlines
from scheduler.serve.wire.prompt import prompts_of

ANYTHING = msgspec.json.Decoder(object)
KINDS = [msgspec.json.Decoder(ChatRequest), msgspec.json.Decoder(CompletionRequest)]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def refusal_of(attempt):
    """The refusal `attempt` ends with, None if it is taken; any other exception is a fault and goes on."""
    try:
        attempt()
    except ApiError as refusal:
        return refusal
    return None


def real_depth(value):
    if isinstance(value, dict):
        return 1 + max(map(real_depth, value.values()), default=0)
    return 1 + max(map(real_depth, value), default=0) if isinstance(value, list) else 0


def real_commas(value):
    if not isinstance(value, dict | list):
        return 0
    items = list(value.values()) if isinstance(value, dict) else value
    return max(len(items) - 1, 0) + sum(map(real_commas, items))


@pytest.mark.slow
@given(json_values, st.booleans(), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_the_outline_is_what_a_parser_would_find_wherever_the_pieces_end(value, ascii_only, piece_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlining, "PIECE_BYTES", piece_bytes)
        *_, found = outlines(json.dumps(value, ensure_ascii=ascii_only).encode())
    assert found == (real_depth(value), real_commas(value))


@given(st.text(alphabet='[]{}"\\,abn', max_size=30), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_brackets_and_quotes_in_a_string_do_not_count(text, piece_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlining, "PIECE_BYTES", piece_bytes)
        *_, found = outlines(json.dumps([text]).encode())
    assert found == (1, 0)


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_the_depth_limit_is_exact(levels):
    body = b"[" * levels + b"]" * levels
    if levels == MAX_DEPTH:
        decode(body, ANYTHING)
    else:
        with pytest.raises(ApiError, match="levels deep"):
            decode(body, ANYTHING)


@pytest.mark.parametrize("items", [MAX_ITEMS, MAX_ITEMS + 1])
def test_the_limit_of_items_is_exact_and_nothing_is_built_of_more(items):
    class Untouched:
        def decode(self, _text):
            raise AssertionError("the body was decoded")

    body = b"[" + b",".join([b"1"] * items) + b"]"
    if items == MAX_ITEMS:
        assert len(decode(body, ANYTHING)) == items
    else:
        with pytest.raises(ApiError, match=f"more than {MAX_ITEMS} items"):
            decode(body, Untouched())


def test_what_is_too_much_is_refused_before_all_of_it_was_looked_at(monkeypatch):
    looked_at = []

    def watched(body):
        for outline in outlines(body):
            looked_at.append(outline)
            yield outline

    monkeypatch.setattr(decoding, "outlines", watched)
    with pytest.raises(ApiError, match="levels deep"):
        decode(b"[" * 10_000_000, ANYTHING)
    assert len(looked_at) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (b"NaN", "the body is not valid JSON: invalid character (byte {at})"),
        (rb'"\ud800"', "the body is not valid JSON: "),
        (rb'"\udc00"', "the body is not valid JSON: invalid utf-16 surrogate pair (byte "),
        (b"1,", "the body is not valid JSON: trailing comma in array"),
    ],
)
def test_a_large_body_is_not_read_a_second_time_to_explain_what_is_wrong_with_it(monkeypatch, fault, message):
    monkeypatch.setattr(decoding, "json", None)
    beginning = b'{"prompt":[' + b"1," * (MAX_EXPLAINED // 2)
    with pytest.raises(ApiError) as refusal:
        decode(beginning + fault + b"]}", KINDS[1])
    assert refusal.value.envelope.error.message.startswith(message.format(at=len(beginning)))


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_decoded_or_refused(body):
    for decoder in KINDS:
        refusal = refusal_of(lambda decoder=decoder: decode(body, decoder))
        assert refusal is None or refusal.status == 400


FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_values_in_any_fields_are_taken_or_refused_by_name(fields):
    body = json.dumps(fields).encode()
    for decoder in KINDS:
        refusal = refusal_of(lambda decoder=decoder: decode(body, decoder).check())
        assert refusal is None or (refusal.status == 400 and refusal.envelope.error.param in fields)


@pytest.mark.slow
@given(json_values)
@settings(max_examples=200, deadline=None)
def test_any_prompt_is_taken_whole_or_refused(value):
    refusal = refusal_of(lambda: prompts_of(value))
    if refusal is None:
        prompts = prompts_of(value)
        assert all(prompts)
        assert value in (prompts, prompts[0])
    else:
        assert refusal.envelope.error.param == "prompt"


@pytest.mark.slow
@given(json_values)
@settings(max_examples=200, deadline=None)
def test_what_goes_out_is_one_line_for_everyone_and_says_the_same(value):
    encoded = encode_json(value)
    assert len(encoded.decode().splitlines()) == 1
    assert json.loads(encoded) == value


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ('{"n": 1.5}', "n", "n: expected `int`, got `float`"),
        ('{"messages": "Hi"}', "messages", "messages: expected `array`, got `str`"),
        ('{"stop": [7]}', "stop", "stop[0]: expected `str`, got `int`"),
        ('{"temperature": NaN}', "temperature", "temperature must be a finite number"),
        ('{"messages": [{"a": Infinity}]}', "messages", "messages[0].a must be a finite number"),
        ('{"user": "\\ud800"}', "user", "user is not Unicode text: half of a surrogate pair in it"),
        ('{"n": 1,}', None, "the body is not valid JSON: "),
        ("[]", None, "the body does not fit: Expected `object`, got `array`"),
    ],
)
def test_a_refusal_says_where_the_fault_is(body, param, message):
    with pytest.raises(ApiError) as refusal:
        decode(body.encode(), KINDS[0])
    assert refusal.value.envelope.error.param == param
    assert refusal.value.envelope.error.message.startswith(message)
