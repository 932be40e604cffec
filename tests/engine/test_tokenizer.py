import concurrent.futures
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError, ParamError
from engine.gguf import GGUFFile
from engine.pretokenizers import PRE_TOKENIZERS
from engine.tokenizer import Tokenizer
from tests.gguf_writer import write_gguf
from tests.tiny_model import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def load(folder, metadata):
    """The tokenizer of a file with nothing but this metadata; a key whose value is None is left out."""
    path = write_gguf(folder / "vocabulary.gguf", {key: value for key, value in metadata.items() if value is not None})
    with GGUFFile.open(path) as file:
        return Tokenizer.from_gguf(file)


def vocabulary(model, tokens, **keys):
    """Metadata from (text, type) pairs."""
    texts, types = zip(*tokens, strict=True)
    metadata = {"model": model, "tokens": list(texts), "token_type": np.array(types, np.int32), **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def byte_level(*, pre="gpt-2", merges=(), extra=(), missing="", **keys):
    """Byte-level BPE: <|endoftext|>, <|im_start|>, <|im_end|> (bos 1, eos 2), `extra`, then bytes and merges."""
    control = [(name, CONTROL) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    letters = [(letter, NORMAL) for letter in byte_alphabet() if letter not in missing]
    merged = [(merge.replace(" ", ""), NORMAL) for merge in merges]
    keys = {"pre": pre, "merges": list(merges), "bos_token_id": 1, "eos_token_id": 2, **keys}
    return vocabulary("gpt2", [*control, *extra, *letters, *merged], **keys)


def spelled(tokenizer, text, **kwargs):
    """The bytes of each token of `text`."""
    return [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, **kwargs)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(scope="module")
def tokenizer(folder):
    """Bytes, a few merges, three control tokens, and a user-defined `<think>`."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ã ©", "< |"]
    return load(folder, byte_level(merges=merges, extra=[("<think>", USER_DEFINED)]))


# Byte-level BPE


def test_merges_are_applied_in_their_order(tokenizer):
    assert spelled(tokenizer, "hello world") == [b"hello", b" w", b"o", b"r", b"l", b"d"]


def test_a_character_of_several_bytes_can_be_one_token_or_several(tokenizer):
    assert spelled(tokenizer, "éè") == ["é".encode(), b"\xc3", b"\xa8"]


def test_a_token_not_spelled_in_byte_letters_is_its_own_text_and_moves_no_neighbour(folder):
    plain = ["a b", "\N{EURO SIGN}", "\N{GRINNING FACE}", "Ġ\N{NO-BREAK SPACE}", "ńx"]
    mixed = ["Ġhe", *plain[:3], "Ã©", *plain[3:], "ĠĊ"]
    tokenizer = load(folder, byte_level(extra=[(text, NORMAL) for text in mixed]))
    texts = [tokenizer.token_bytes(3 + index).decode() for index in range(len(mixed))]
    assert texts == [" he", *plain[:3], "é", *plain[3:], " \n"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_cut_into_words_loses_nothing(folder, pre):
    tokenizer = load(folder, byte_level(pre=pre, merges=["h e", "1 2", "Ġ w"]))

    @given(st.text(max_size=60) | st.text("ab1 \n\t'sS<|>é", max_size=60))
    @settings(max_examples=40, deadline=None)
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False, add_bos=False)) == text

    check()


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("gpt-2", "1234", ["1234"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("default", "a,b", ["a", ",", "b"]),
        ("gpt-2", "  a", ["Ġ", "Ġa"]),
        ("gpt-2", "it's", ["it", "'s"]),
        ("gpt-2", "it'S", ["it", "'", "S"]),
        ("llama-bpe", "it'S", ["it", "'S"]),
        ("gpt-2", "!\n", ["!", "Ċ"]),
        ("llama-bpe", "!\n", ["!Ċ"]),
    ],
)
def test_a_text_is_cut_into_words_by_the_rule_the_file_names(folder, pre, text, expected):
    # Every two tokens that could come together in the text make a third, so that what stays apart is a word.
    letters = text.replace(" ", "Ġ").replace("\n", "Ċ")
    pieces = dict.fromkeys(letters[i:j] for i, j in itertools.combinations(range(len(letters) + 1), 2))
    merges = [f"{piece[:-1]} {piece[-1]}" for piece in pieces if len(piece) > 1]
    tokenizer = load(folder, byte_level(pre=pre, merges=merges))
    letter_texts = [word.replace("Ġ", " ").replace("Ċ", "\n").encode() for word in expected]
    assert spelled(tokenizer, text, add_bos=False) == letter_texts


def test_without_a_named_rule_the_default_one_is_used(folder):
    assert spelled(load(folder, byte_level(pre=None, merges=[", b"])), "a,b") == [b"a", b",", b"b"]


def test_a_word_that_is_a_token_needs_no_merges_where_the_rule_says_so(folder):
    whole = [("hello", NORMAL)]
    assert spelled(load(folder, byte_level(pre="llama-bpe", extra=whole)), "hello", add_bos=False) == [b"hello"]
    assert spelled(load(folder, byte_level(pre="gpt-2", extra=whole)), "hello") == [b"h", b"e", b"l", b"l", b"o"]


def test_bytes_that_are_no_token_are_dropped(folder):
    tokenizer = load(folder, byte_level(missing=byte_alphabet()[0xC3]))
    assert tokenizer.decode(tokenizer.encode("aéb")) == "a\ufffdb"


# Special tokens


def test_control_tokens_are_parsed_only_on_request(tokenizer):
    assert tokenizer.encode("he<|im_end|>he") == [*tokenizer.encode("he"), 2, *tokenizer.encode("he")]
    assert b"".join(spelled(tokenizer, "<|im_end|>", parse_special=False)) == b"<|im_end|>"
    assert 2 not in tokenizer.encode("<|im_end|>", parse_special=False)


def test_user_defined_tokens_are_always_found(tokenizer):
    assert tokenizer.encode("<think>", parse_special=False) == tokenizer.encode("<think>", parse_special=True) == [3]


def test_of_two_names_at_one_place_the_longest_is_found(folder):
    extra = [("<a>", USER_DEFINED), ("<a><b>", USER_DEFINED), ("<b>", USER_DEFINED)]
    assert load(folder, byte_level(extra=extra)).encode("<a><b><a>") == [4, 3]


@given(
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_", "start|>", "<|endoftext|>", "<", "|>", "he", " w", "\n", "<think>"])
    )
)
@settings(max_examples=200, deadline=None)
def test_a_text_never_becomes_a_control_token_unless_they_are_parsed(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode(text, parse_special=False)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_a_control_token_stays_out_of_reach_of_whole_word_lookup(folder):
    tokenizer = load(folder, byte_level(pre="llama-bpe", extra=[("stop", CONTROL)]))
    assert spelled(tokenizer, "stop", parse_special=False, add_bos=False) == [b"s", b"t", b"o", b"p"]


def test_control_tokens_are_skipped_in_text_or_shown_by_name(tokenizer):
    ids = tokenizer.encode("<|im_start|>he<think><|im_end|>")
    assert tokenizer.decode(ids) == "he<think>"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>he<think><|im_end|>"


def test_text_ends_at_every_token_that_ends_a_text_or_a_turn(folder):
    extra = [("<|eot_id|>", CONTROL), ("<|mine|>", CONTROL), ("<|tool|>", CONTROL)]
    tokenizer = load(folder, byte_level(extra=extra, eot_token_id=4))
    assert tokenizer.eos_ids == {0, 2, 3, 4}
    assert tokenizer.eos_id == 2
    assert tokenizer.special_ids == {0, 1, 2, 3, 4, 5}


def test_a_file_without_token_types_still_has_control_tokens(folder):
    tokenizer = load(folder, byte_level(token_type=None))
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("<|im_start|>") == [1]


# BOS


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"pre": "gpt-2"}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "gpt-2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "llama-bpe", "bos_token_id": None}, False),
    ],
)
def test_bos_is_put_before_a_text_if_the_file_or_else_its_kind_says_so(folder, keys, expected):
    tokenizer = load(folder, byte_level(**keys))
    assert tokenizer.add_bos is expected
    assert tokenizer.encode("") == ([1] if expected else [])


def test_the_caller_can_overrule_the_file_about_bos(folder):
    tokenizer = load(folder, byte_level(add_bos_token=True))
    assert tokenizer.encode("", add_bos=False) == []
    assert load(folder, byte_level(add_bos_token=False)).encode("", add_bos=True) == [1]


# Bytes and text


def test_a_token_is_the_bytes_it_adds(folder):
    extra = [("<think>", USER_DEFINED), ("Ġa", NORMAL), ("▁raw", NORMAL), ("[PAD]", UNUSED), ("café", USER_DEFINED)]
    tokenizer = load(folder, byte_level(extra=extra))
    assert [tokenizer.token_bytes(token_id) for token_id in range(8)] == [
        b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>", b"<think>", b" a", "▁raw".encode(), b"[PAD]", "café".encode(),
    ]  # fmt: skip
    assert [tokenizer.token_bytes(8 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_invalid_utf8_is_replaced_in_a_decoded_text(tokenizer):
    ids = [*tokenizer.encode("é")[:1], *tokenizer.encode("è")[:1], *tokenizer.encode("he")]
    assert tokenizer.decode(ids) == "é\ufffdhe"


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**70])
def test_an_id_that_is_no_token_is_refused(tokenizer, token_id):
    with pytest.raises(ParamError, match=str(token_id)):
        tokenizer.decode([token_id])
    with pytest.raises(ParamError, match=str(token_id)):
        tokenizer.token_bytes(token_id)


@pytest.mark.parametrize("parse_special", [True, False])
def test_a_lone_surrogate_is_refused_by_name(tokenizer, parse_special):
    with pytest.raises(ParamError, match=r"U\+D83D"):
        tokenizer.encode("a\ud83db", parse_special=parse_special)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["a", " ", "\n", "'", "é", "😀", "<", "<|", "<|im_end|>", "\x00", "1", " a"])
def test_a_long_text_of_one_unit_is_encoded_whole(tokenizer, unit):
    text = unit * (200_000 // len(unit))
    for parse_special in (True, False):
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert tokenizer.decode(ids, skip_special=False) == text


def test_threads_share_a_tokenizer(tokenizer):
    texts = [f"hello <|im_end|> world {i}" * 20 for i in range(32)]
    alone = [tokenizer.encode(text) for text in texts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone


# SentencePiece BPE

SPECIAL_PIECES = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
BYTE_PIECES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]


def sentencepiece(pieces, *, extra=(), byte_pieces=BYTE_PIECES, **keys):
    """SentencePiece: <unk>, <s>, </s>, the bytes, `extra`, then `pieces`, of falling score in the order given."""
    tokens = [*SPECIAL_PIECES, *byte_pieces, *extra, *((piece, NORMAL) for piece in pieces)]
    scores = np.zeros(len(tokens), np.float32)
    scores[-len(pieces) :] = -np.arange(len(pieces))
    keys = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **keys}
    return vocabulary("llama", tokens, **keys)


def test_the_piece_of_the_highest_score_is_joined_first(folder):
    assert spelled(load(folder, sentencepiece(["bc", "ab", "▁", "a", "b", "c"])), "abc", add_bos=False) == [
        b" ", b"a", b"bc",
    ]  # fmt: skip
    assert spelled(load(folder, sentencepiece(["ab", "bc", "▁", "a", "b", "c"])), "abc", add_bos=False) == [
        b" ", b"ab", b"c",
    ]  # fmt: skip


def test_a_text_begins_with_bos_and_a_space_unless_the_file_says_otherwise(folder):
    pieces = ["▁a", "▁", "a"]
    assert spelled(load(folder, sentencepiece(pieces)), "a") == [b"<s>", b" a"]
    assert spelled(load(folder, sentencepiece(pieces, add_space_prefix=False)), "a") == [b"<s>", b"a"]
    assert load(folder, sentencepiece(pieces)).encode("") == [1]
    assert load(folder, sentencepiece(pieces, add_bos_token=False)).encode("") == []


def test_the_leading_space_comes_again_after_a_special_token(folder):
    tokenizer = load(folder, sentencepiece(["▁a", "▁", "a"], extra=[("<x>", USER_DEFINED)]))
    assert spelled(tokenizer, "a<x>a</s>a", add_bos=False) == [b" a", b"<x>", b" a", b"</s>", b" a"]


def test_what_no_piece_covers_becomes_bytes(folder):
    tokenizer = load(folder, sentencepiece(["▁", "a"], add_space_prefix=False))
    assert spelled(tokenizer, "aé\n", add_bos=False) == [b"a", b"\xc3", b"\xa9", b"\n"]


def test_without_byte_pieces_it_becomes_the_unknown_token(folder):
    tokenizer = load(folder, sentencepiece(["▁", "a"], byte_pieces=[], add_space_prefix=False))
    assert tokenizer.encode("aéa", add_bos=False) == [4, 0, 4]


def test_a_text_that_spells_a_control_or_a_byte_piece_stays_text(folder):
    steps = ["</", "s>", "<0", "<0x", "0A", "0A>", "▁", *"</s>0xA"]
    tokenizer = load(folder, sentencepiece(steps, add_space_prefix=False))
    for text, expected in (("</s>", [b"</", b"s>"]), ("<0x0A>", [b"<0x", b"0A>"])):
        assert spelled(tokenizer, text, parse_special=False, add_bos=False) == expected


def joined_by_score(text, scores):
    """The definition: of all neighbours that make a piece, join those of the highest score, the leftmost if equal."""
    symbols = list(text)
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not joins:
            return symbols
        place = min(joins)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]


@given(
    st.lists(st.text("abc ", min_size=2, max_size=4), unique=True, max_size=12),
    st.lists(st.text("abc ", max_size=12), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_pieces_are_joined_as_sentencepiece_joins_them(folder, joined, texts):
    # A piece that can be cut at two places that overlap (such as "aaa") has no exact form as merges: left out here.
    pieces = [piece for piece in joined if not any(piece[k:] == piece[:-k] for k in range(1, len(piece)))] + list(
        "abc "
    )
    scores = {piece: -rank for rank, piece in enumerate(pieces)}
    visible = [piece.replace(" ", "▁") for piece in pieces]
    tokenizer = load(folder, sentencepiece(visible, add_space_prefix=False))
    for text in texts:
        assert [p.decode() for p in spelled(tokenizer, text, add_bos=False)] == joined_by_score(text, scores)


# Files that cannot be served


def changed(metadata, **keys):
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
    ("keys", "subject", "reason"),
    [
        ({"model": None}, "model", "no such"),
        ({"model": "bert"}, "model", "'bert' is not supported"),
        ({"pre": "megatron"}, "pre", "'megatron' is not supported"),
        ({"pre": 7}, "pre", "must be a string"),
        ({"tokens": None}, "tokens", "no such"),
        ({"tokens": []}, "tokens", "empty"),
        ({"tokens": np.arange(5)}, "tokens", "must be an array of strings"),
        ({"merges": None}, "merges", "no such"),
        ({"merges": ["h e", "he"]}, "merges", "merge 1, 'he'"),
        ({"merges": ["h q"]}, "merges", "merge 0, 'h q'"),
        ({"merges": ["xx h"]}, "merges", "merge 0, 'xx h'"),
        ({"token_type": np.ones(5, np.int32)}, "token_type", "5 elements for 260 tokens"),
        ({"token_type": np.full(260, 9, np.int32)}, "token_type", "9"),
        ({"bos_token_id": 260}, "bos_token_id", r"must be in \[0, 259\], is 260"),
        ({"eos_token_id": 2**32 - 1}, "eos_token_id", "4294967295"),
        ({"eos_token_id": "2"}, "eos_token_id", "must be an integer"),
        ({"eot_token_id": 10**6}, "eot_token_id", "1000000"),
        ({"add_bos_token": 1}, "add_bos_token", "must be a boolean"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token", "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_a_broken_byte_level_vocabulary_is_refused_by_key(folder, keys, subject, reason):
    with pytest.raises(ModelFileError, match=reason) as refusal:
        load(folder, changed(byte_level(merges=["h e"]), **keys))
    assert refusal.value.subject == f"tokenizer.ggml.{subject}"


@pytest.mark.parametrize(
    ("keys", "subject", "reason"),
    [
        ({"scores": None}, "scores", "no such"),
        ({"scores": np.zeros(3, np.float32)}, "scores", "3 elements for 261 tokens"),
        ({"add_space_prefix": "yes"}, "add_space_prefix", "must be a boolean"),
    ],
)
def test_a_broken_sentencepiece_vocabulary_is_refused_by_key(folder, keys, subject, reason):
    with pytest.raises(ModelFileError, match=reason) as refusal:
        load(folder, changed(sentencepiece(["▁", "a"]), **keys))
    assert refusal.value.subject == f"tokenizer.ggml.{subject}"


def test_a_token_that_occurs_twice_is_refused(folder):
    with pytest.raises(ModelFileError, match="tokens 3 and 4 are both 'x'"):
        load(folder, byte_level(extra=[("x", USER_DEFINED), ("x", USER_DEFINED)]))


def test_empty_tokens_are_no_text(folder):
    tokenizer = load(folder, byte_level(extra=[("", NORMAL), ("", CONTROL), ("", USER_DEFINED)]))
    assert tokenizer.decode([3, 4, 5], skip_special=False) == ""
    assert tokenizer.decode(tokenizer.encode("he<|im_end|>"), skip_special=False) == "he<|im_end|>"


def test_a_byte_token_that_names_no_byte_is_refused(folder):
    with pytest.raises(ModelFileError, match="'<0xZZ>'"):
        load(folder, sentencepiece(["▁"], extra=[("<0xZZ>", BYTE)]))
