import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.detokenizer import IncrementalDecoder


class ByteTokens:
    """A tokenizer whose tokens are the given byte strings."""

    def __init__(self, tokens, special_ids=frozenset()):
        self.tokens = tokens
        self.special_ids = special_ids

    def token_bytes(self, token_id):
        return self.tokens[token_id]


def pieces(tokens, **kwargs):
    decoder = IncrementalDecoder(ByteTokens(tokens), **kwargs)
    return [decoder.push(token_id) for token_id in range(len(tokens))] + [decoder.flush()]


def test_half_a_character_is_held_until_its_other_half_arrives():
    assert pieces([b"\xc3", b"\xa9", b"x"]) == ["", "é", "x", ""]


def test_an_emoji_spread_over_three_tokens_appears_whole():
    assert pieces([b"\xf0\x9f", b"\x98", b"\x80"]) == ["", "", "\U0001f600", ""]


@pytest.mark.parametrize("text", ["مرحبا", "नमस्ते", "世界", "é", "🙂"])
def test_every_character_appears_with_its_last_byte(text):
    decoder = IncrementalDecoder(ByteTokens([bytes([byte]) for byte in range(256)]))
    for character in text:
        *beginning, last = character.encode()
        assert [decoder.push(byte) for byte in beginning] == [""] * len(beginning)
        assert decoder.push(last) == character
    assert decoder.flush() == ""


def test_text_and_an_unfinished_character_in_one_token_are_told_apart():
    assert pieces([b"ab\xe4\xb8", b"\x96c"]) == ["ab", "世c", ""]


@pytest.mark.parametrize("token", [b" Hello", b"  ", b"\nHello", b"\t", b" "])
def test_white_space_is_kept_at_both_ends(token):
    assert pieces([token, token]) == [token.decode(), token.decode(), ""]


def test_a_literal_replacement_character_is_not_taken_for_an_unfinished_one():
    assert pieces(["\ufffd".encode(), b"x"]) == ["\ufffd", "x", ""]


def test_a_character_cut_at_the_end_becomes_one_replacement_character():
    assert pieces([b"a", b"\xf0\x9f", b"\x98"]) == ["a", "", "", "\ufffd"]


def test_an_invalid_byte_is_replaced_at_once():
    assert pieces([b"\xff", b"a"]) == ["\ufffd", "a", ""]


def test_control_tokens_have_no_text_and_do_not_split_a_character():
    tokens = ByteTokens([b"\xc3", b"<|im_end|>", b"\xa9"], special_ids=frozenset({1}))
    decoder = IncrementalDecoder(tokens)
    assert [decoder.push(token_id) for token_id in (0, 1, 2)] == ["", "", "é"]


def test_control_tokens_are_shown_when_asked_for():
    decoder = IncrementalDecoder(ByteTokens([b"<|im_end|>"], special_ids=frozenset({0})), skip_special=False)
    assert decoder.push(0) == "<|im_end|>"


def test_two_decoders_share_no_state():
    tokens = ByteTokens([b"\xc3", b"\xa9", b"x"])
    first, second = IncrementalDecoder(tokens), IncrementalDecoder(tokens)
    first.push(0)
    assert second.push(2) == "x"
    assert first.push(1) == "é"


def test_a_flushed_decoder_begins_anew():
    decoder = IncrementalDecoder(ByteTokens([b"\xc3", b"x"]))
    decoder.push(0)
    assert decoder.flush() == "\ufffd"
    assert decoder.push(1) == "x"
    assert decoder.flush() == ""


nearly_utf8 = st.one_of(
    st.binary(max_size=6),
    st.text(max_size=4).map(str.encode),
    st.sampled_from(
        [b"\xe0", b"\x80", b"\xed\xa0\x80", b"\xf4\x90", b"\xf0\x80", b"\xc0\xaf", b"\xef\xbf\xbd", b"\xf0\x9f"]
    ),
)


@pytest.mark.slow
@given(st.lists(nearly_utf8, max_size=12))
@example([b"\xe0", b"\x80"])
@settings(max_examples=500, deadline=None)
def test_pieces_joined_equal_the_bytes_decoded_at_once(tokens):
    assert "".join(pieces(tokens)) == b"".join(tokens).decode(errors="replace")


@pytest.mark.slow
@given(st.lists(nearly_utf8, max_size=12))
@settings(max_examples=300, deadline=None)
def test_what_is_released_never_changes_and_nothing_final_is_kept(tokens):
    decoder, joined, released = IncrementalDecoder(ByteTokens(tokens)), b"", ""
    for token_id, token in enumerate(tokens):
        joined += token
        released += decoder.push(token_id)
        for tail in (b"", b"x", b"\x80", b"\xbf\xbf\xbf"):
            assert (joined + tail).decode(errors="replace").startswith(released)
        assert joined.decode(errors="replace").removesuffix("\ufffd") in {released, released.removesuffix("\ufffd")}
