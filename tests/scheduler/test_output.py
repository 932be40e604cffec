import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import RowError, Sampled
from scheduler.output import TextOutput
from tests.fakes import ByteTokenizer
from tests.scheduler.driver import request


def output(tokenizer=None, **params):
    return TextOutput(request(**params), 0, tokenizer or ByteTokenizer())


def push(out, text, *, hidden=False):
    """[(text, bytes of the tokens released)] of each delta."""
    deltas = [out.push(Sampled(byte), hidden=hidden) for byte in text]
    return [(d.text, bytes(t.token_id for t in d.tokens)) for d in deltas if d is not None]


def flush(out):
    delta = out.flush()
    return None if delta is None else (delta.text, bytes(t.token_id for t in delta.tokens))


def test_text_comes_as_soon_as_it_is_whole():
    assert push(output(), "aé€".encode()) == [("a", b"a"), ("é", "é".encode()), ("€", "€".encode())]


def test_tokens_are_held_with_the_text_they_belong_to():
    out = output(stop=("abc!",))
    assert push(out, b"abc") == []
    assert push(out, b"d") == [("abcd", b"abcd")]


def test_a_token_goes_with_the_last_of_its_text():
    class Pairs(ByteTokenizer):
        def token_bytes(self, token_id):
            return bytes([token_id]) * 2

    out = output(Pairs(), stop=("bc",))
    assert push(out, b"a") == [("aa", b"a")]
    assert push(out, b"b") == [("b", b"")]
    assert push(out, b"x") == [("bxx", b"bx")]


def test_flush_releases_everything_held():
    out = output(stop=("abc",))
    push(out, b"ab")
    assert flush(out) == ("ab", b"ab")
    assert flush(out) is None


def test_after_a_stop_string_the_tokens_come_without_text():
    out = output(stop=("bc",))
    assert push(out, b"abc") == [("a", b"a")]
    assert out.matched == "bc"
    assert flush(out) == ("", b"bc")


def test_the_stop_string_is_shown_on_request():
    out = output(stop=("bc",), include_stop_str_in_output=True)
    assert push(out, b"abc") == [("a", b"a"), ("bc", b"bc")]


def test_a_cut_character_becomes_one_replacement():
    out = output()
    assert push(out, "€".encode()[:2]) == []
    assert flush(out) == ("\ufffd", "€".encode()[:2])


def test_a_replacement_at_the_end_can_complete_a_stop_string():
    out = output(stop=("a\ufffd",))
    push(out, b"a\xe2")
    assert flush(out) == ("", b"a\xe2")
    assert out.matched == "a\ufffd"


def test_a_hidden_token_has_no_text_but_is_released():
    out = output()
    assert push(out, b"x", hidden=True) == []
    assert flush(out) == ("", b"x")


def test_control_tokens_have_text_on_request_only():
    special = Sampled(256)
    assert output().push(special, hidden=False) is None
    assert output(skip_special_tokens=False).push(special, hidden=False).text == "<|im_start|>"


def test_logprobs_stay_with_their_token():
    delta = output().push(Sampled(97, logprobs="of a"), hidden=False)
    assert delta.tokens[0].logprobs == "of a"


def test_a_failing_tokenizer_is_an_error_of_this_request():
    class Broken(ByteTokenizer):
        def token_bytes(self, token_id):
            raise KeyError(token_id)

    error = output(Broken()).push(Sampled(1), hidden=False)
    assert isinstance(error, RowError)
    assert isinstance(error.cause, KeyError)
    assert "KeyError" not in error.message


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab€", max_size=20),
    cut=st.integers(0, 3),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_no_token_is_lost_and_none_runs_ahead_of_its_text(text, cut, stops, include):
    ids = text.encode()[: len(text.encode()) - cut]
    out = output(stop=tuple(stops), include_stop_str_in_output=include)
    shown, released = "", b""
    for count, byte in enumerate(ids, 1):
        for delta_text, delta_ids in push(out, [byte]):
            shown += delta_text
            released += delta_ids
        assert ids.startswith(released)
        if out.matched is not None:
            ids = ids[:count]
            break
        assert shown.startswith(released.decode(errors="ignore"))
    rest = flush(out) or ("", b"")
    assert released + rest[1] == ids
    whole = ids.decode(errors="replace")
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    assert (out.matched is not None) == bool(ends)
    if not ends:
        assert shown + rest[0] == whole


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_stop_strings_count_after_min_tokens(min_tokens):
    out = output(stop=("x",), min_tokens=min_tokens)
    texts = push(out, b"xxx")
    assert [t for t, _ in texts] == ["x"] * min_tokens
