"""Pieces of text from the default model's tokens, one id at a time."""

import pytest

from engine.detokenizer import IncrementalDecoder
from engine.gguf import GGUFFile
from engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_path):
    with GGUFFile.open(model_path) as file:
        return Tokenizer.from_gguf(file)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([10813, 242, 218], ["", "", "\U0001f600"]),
        ([38699], [" Hello"]),
        ([216, 38699], [" ", " Hello"]),
        ([198, 19556], ["\n", "Hello"]),
        ([256], ["  "]),
        ([2], [""]),
    ],
)
def test_a_piece_is_exactly_the_bytes_that_became_whole(tokenizer, ids, expected):
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(token_id) for token_id in ids] == expected
    assert decoder.flush() == ""


@pytest.mark.parametrize(
    "ids",
    [
        [23274, 115, 40993, 179, 120, 248],
        [21706, 20602, 44626, 31462, 10805],
        [30658, 35090, 38770, 16525, 26293, 30581],
    ],
    ids=["Chinese", "Arabic", "Devanagari"],
)
def test_every_letter_appears_with_the_token_that_completes_it(tokenizer, ids):
    decoder, shown = IncrementalDecoder(tokenizer), ""
    for count, token_id in enumerate(ids, 1):
        shown += decoder.push(token_id)
        joined = b"".join(map(tokenizer.token_bytes, ids[:count]))
        assert shown == joined.decode(errors="ignore")
    assert shown + decoder.flush() == tokenizer.decode(ids)
    assert "\ufffd" not in shown
