"""What a model file says about its tokens: texts, kinds, bytes, and which of them begin and end a text.

Keys after `docs/gguf.md` of github.com/ggml-org/ggml.
"""

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.gguf import GGUFFile

MODEL_KEY = "tokenizer.ggml.model"
TOKENS_KEY = "tokenizer.ggml.tokens"
TYPES_KEY = "tokenizer.ggml.token_type"

SPACE = "\u2581"  # how SentencePiece writes a space

# Written by chat and base models where a turn or a text ends. A file names one of them as its EOS, often the one of
# the base model, while the chat model ends its turns with another: llama.cpp ends on all of them, and so does this.
_END_TEXTS = frozenset({
    "<|end_of_text|>",
    "<|end|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
})  # fmt: skip


class TokenType(enum.IntEnum):
    """The kinds of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a model; an id is an index into `texts`, `types` and `token_bytes`.

    `model` is "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE). `texts` are as the file spells them,
    `token_bytes` what they add to a text. `eos_ids` holds every token that ends a text or a turn, `eos_id` the one the
    file calls so; `special_ids` those and all others that are structure, not text.
    """

    model: str
    texts: Sequence[str]
    types: Sequence[TokenType]
    token_bytes: Sequence[bytes]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """The vocabulary in `file`.

        Raises `ModelFileError` naming the key: a vocabulary of another kind, without tokens or with one twice, an
        array of another length than the tokens', a token type that does not exist, an id that is no token.
        """
        model = file.require(MODEL_KEY, str)
        if model not in _SPELLINGS:
            supported = " and ".join(map(repr, _SPELLINGS))
            raise ModelFileError(file.path, f"{model!r} is not supported; supported are {supported}", MODEL_KEY)
        texts = file.require(TOKENS_KEY, list)
        _check_texts(file, texts)
        types = _token_types(file, len(texts))

        bos_id, eos_id, eot_id, eom_id = (_token_id(file, name, len(texts)) for name in ("bos", "eos", "eot", "eom"))
        end_ids = {token_id for token_id, text in enumerate(texts) if text in _END_TEXTS}
        structure = {i for i, kind in enumerate(types) if kind is TokenType.CONTROL or kind is TokenType.UNKNOWN}
        eos_ids = _without_none(eos_id, eot_id, eom_id, *end_ids)
        special_ids = _without_none(bos_id, *eos_ids, *structure)

        token_bytes = _SPELLINGS[model](texts)
        for token_id, kind in enumerate(types):
            if kind is TokenType.BYTE:
                token_bytes[token_id] = _byte(file, token_id, texts[token_id])
            elif kind is not TokenType.NORMAL or token_id in special_ids:
                token_bytes[token_id] = texts[token_id].encode()
        return cls(
            model=model,
            texts=texts,
            types=types,
            token_bytes=token_bytes,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=eos_ids,
            special_ids=special_ids,
        )

    def ids_of(self, *kinds: TokenType) -> dict[str, int]:
        """The tokens of these kinds that are text, by their spelling."""
        return {
            text: token_id
            for token_id, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind in kinds and token_id not in self.special_ids and text
        }


def _without_none(*ids: int | None) -> frozenset[int]:
    return frozenset(token_id for token_id in ids if token_id is not None)


def require_one_per_token(file: GGUFFile, key: str, n_tokens: int) -> NDArray[Any]:
    """The array of numbers `key`, which must have an element for each token; raises `ModelFileError` naming it."""
    values = file.require(key, np.ndarray)
    if len(values) != n_tokens:
        raise ModelFileError(file.path, f"has {len(values)} elements for {n_tokens} tokens", key)
    return values


def _check_texts(file: GGUFFile, texts: list[str]) -> None:
    """Refuse an empty vocabulary, and one in which a text means two tokens."""
    if not texts:
        raise ModelFileError(file.path, "is empty", TOKENS_KEY)
    first: dict[str, int] = {}
    for token_id, text in enumerate(texts):
        if text and first.setdefault(text, token_id) != token_id:
            raise ModelFileError(file.path, f"tokens {first[text]} and {token_id} are both {text!r}", TOKENS_KEY)


def _token_types(file: GGUFFile, n_tokens: int) -> list[TokenType]:
    if TYPES_KEY not in file.metadata:
        return [TokenType.NORMAL] * n_tokens
    values = require_one_per_token(file, TYPES_KEY, n_tokens)
    try:
        kinds = {value: TokenType(value) for value in np.unique(values).tolist()}
    except ValueError as error:
        raise ModelFileError(file.path, f"holds a type that does not exist: {error}", TYPES_KEY) from error
    return [kinds[value] for value in values.tolist()]


def _token_id(file: GGUFFile, name: str, n_tokens: int) -> int | None:
    """The token the file names as its `name` (bos, eos, ...), or None if it names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token_id = file.require(key, int)
    if not 0 <= token_id < n_tokens:
        raise ModelFileError(file.path, f"must be in [0, {n_tokens - 1}], is {token_id}", key)
    return token_id


def _byte(file: GGUFFile, token_id: int, text: str) -> bytes:
    """The byte of a token such as `<0x0A>`."""
    match = re.fullmatch(r"<0x([0-9A-F]{2})>", text)
    if match is None:
        raise ModelFileError(file.path, f"token {token_id} is of type BYTE and spelled {text!r}", TOKENS_KEY)
    return bytes.fromhex(match[1])


def _byte_letters() -> Iterator[str]:
    """The letters that stand for bytes 0..255 in byte-level BPE (github.com/openai/gpt-2, src/encoder.py)."""
    spare = count(0x100)
    for byte in range(0x100):
        is_printable = 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD)
        yield chr(byte if is_printable else next(spare))


_LETTERS = list(map(ord, _byte_letters()))
_BYTE_OF_LETTER = np.full(max(_LETTERS) + 2, -1, np.int16)  # the last entry is for all characters beyond
_BYTE_OF_LETTER[_LETTERS] = np.arange(0x100)


def _bytes_of_letters(texts: Sequence[str]) -> list[bytes]:
    """Each text's letters as bytes, or the text as it is if a character of it is no such letter."""
    # All at once: to look letters up one by one would take a good part of the time a server needs to start.
    letters = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    codes = _BYTE_OF_LETTER[np.minimum(letters, len(_BYTE_OF_LETTER) - 1)]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(text) for text in texts])])
    strangers = np.concatenate([np.zeros(1, np.int64), np.cumsum(codes < 0)])[starts]
    is_spelled = (np.diff(strangers) == 0).tolist()
    joined, ends = codes.astype(np.uint8).tobytes(), starts.tolist()
    spans = zip(texts, is_spelled, ends, ends[1:], strict=False)
    return [joined[start:end] if spelled else text.encode() for text, spelled, start, end in spans]


def _bytes_of_pieces(texts: Sequence[str]) -> list[bytes]:
    return [text.replace(SPACE, " ").encode() for text in texts]


_SPELLINGS: Mapping[str, Callable[[Sequence[str]], list[bytes]]] = {
    "gpt2": _bytes_of_letters,
    "llama": _bytes_of_pieces,
}
