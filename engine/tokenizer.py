"""Text to token ids and back, from the vocabulary of a GGUF file.

The pieces of a text between special tokens are encoded by the `tokenizers` library, which lets other threads run
meanwhile; finding the special tokens is done here, because whether a control token may be found depends on the text.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Self

import tokenizers
from tokenizers import models, pre_tokenizers

from engine.errors import ModelFileError, ParamError
from engine.gguf import GGUFFile
from engine.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from engine.text import any_of, check_encodable
from engine.vocabulary import SPACE, TokenType, Vocabulary, require_one_per_token

_MERGES_KEY = "tokenizer.ggml.merges"
_PRE_KEY = "tokenizer.ggml.pre"
_SCORES_KEY = "tokenizer.ggml.scores"
_ADD_BOS_KEY = "tokenizer.ggml.add_bos_token"


class Tokenizer:
    """A model's tokenizer; any number of threads may use one at the same time.

    `vocab_size` is the number of tokens. `bos_id` begins a text (None if the model has no such token), and `add_bos`
    says whether the model expects it there. Each of `eos_ids` ends a text or a turn. `special_ids` are the control
    tokens: structure, not text.
    """

    def __init__(
        self, vocabulary: Vocabulary, bpe: tokenizers.Tokenizer, *, add_bos: bool, add_space_prefix: bool
    ) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._bpe = bpe
        self._is_sentencepiece = vocabulary.model == "llama"
        self._prefix = " " if add_space_prefix else ""
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_ids = vocabulary.special_ids
        self.add_bos = add_bos

        user_defined = vocabulary.ids_of(TokenType.USER_DEFINED)
        special = {vocabulary.texts[token_id]: token_id for token_id in vocabulary.special_ids}
        self._whole_tokens = {**user_defined, **special}
        self._text_splitter = any_of(user_defined)
        self._special_splitter = any_of(self._whole_tokens)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """The tokenizer `file` describes.

        Raises `ModelFileError` naming the metadata key that is missing, of the wrong length, out of range, or names a
        kind of tokenizer that is not supported.
        """
        vocabulary = Vocabulary.from_gguf(file)
        if vocabulary.model == "gpt2":
            pre_tokenizer = _pre_tokenizer(file)
            bpe = _byte_level_bpe(file, vocabulary, pre_tokenizer)
            add_bos = pre_tokenizer.add_bos
            add_space_prefix = False
        else:
            bpe = _sentencepiece_bpe(file, vocabulary)
            add_bos = True
            add_space_prefix = file.get("tokenizer.ggml.add_space_prefix", bool, default=True)
        if vocabulary.bos_id is None and file.get(_ADD_BOS_KEY, bool, default=False):
            raise ModelFileError(file.path, "is true, and there is no tokenizer.ggml.bos_token_id", _ADD_BOS_KEY)
        add_bos = file.get(_ADD_BOS_KEY, bool, default=add_bos and vocabulary.bos_id is not None)
        return cls(vocabulary, bpe, add_bos=add_bos, add_space_prefix=add_space_prefix)

    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]:
        """The token ids of `text`, in time proportional to its length.

        Control tokens spelled out in the text become these tokens only with `parse_special`. `add_bos` None follows
        the model's own rule; without a `bos_id` nothing is added.

        Raises `ParamError` if the text holds a lone surrogate, which has no UTF-8.
        """
        check_encodable("text", text)
        splitter = self._special_splitter if parse_special else self._text_splitter
        pieces = splitter.split(text)  # text and whole token in turn, beginning and ending with a text
        encodings = self._bpe.encode_batch_fast(self._spell(pieces[::2]), add_special_tokens=False)
        ids = self._opening(add_bos)
        for encoding, name in zip_longest(encodings, pieces[1::2]):
            ids += encoding.ids
            if name is not None:
                ids.append(self._whole_tokens[name])
        return ids

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes this token adds to a text; a control token's are its name. Raises `ParamError` for no token."""
        if not 0 <= token_id < self.vocab_size:
            raise ParamError("tokens", f"a token id must be in [0, {self.vocab_size - 1}], got {token_id}")
        return self._token_bytes[token_id]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`: their bytes joined, invalid UTF-8 replaced by U+FFFD, nothing stripped.

        Raises `ParamError` for an id that is no token.
        """
        skipped = self.special_ids if skip_special else frozenset()
        joined = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in skipped)
        return joined.decode(errors="replace")

    def _opening(self, add_bos: bool | None) -> list[int]:
        wanted = self.add_bos if add_bos is None else add_bos
        return [self.bos_id] if wanted and self.bos_id is not None else []

    def _spell(self, texts: Sequence[str]) -> Sequence[str]:
        """`texts` as the merges expect them: for SentencePiece, spaces are visible and each text begins with one."""
        if not self._is_sentencepiece:
            return texts
        return [(self._prefix + text).replace(" ", SPACE) if text else "" for text in texts]


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    name = file.get(_PRE_KEY, str, "default")
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        raise ModelFileError(file.path, f"{name!r} is not supported; supported are {supported}", _PRE_KEY)
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(file: GGUFFile, vocabulary: Vocabulary, pre_tokenizer: PreTokenizer) -> tokenizers.Tokenizer:
    """Byte-level BPE (github.com/openai/gpt-2). Bytes that are no token are dropped."""
    ids = vocabulary.ids_of(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED)
    written = file.require(_MERGES_KEY, list)
    merges = [merge.partition(" ")[::2] for merge in written]
    for merge, (left, right) in zip(written, merges, strict=True):
        if not (left in ids and right in ids and left + right in ids):
            index = written.index(merge)
            raise ModelFileError(file.path, f"merge {index}, {merge!r}, does not make a token of two", _MERGES_KEY)
    bpe = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=pre_tokenizer.ignore_merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
                for expression in pre_tokenizer.expressions
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _sentencepiece_bpe(file: GGUFFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE (github.com/google/sentencepiece, src/bpe_model.cc), in the terms of merges.

    SentencePiece joins, of all neighbours that make a piece, those that make the piece of the highest score; so every
    way to cut a piece in two is a merge, ranked by the score of the piece. (Of two overlapping places where one and the
    same piece could be joined, SentencePiece takes the left; merges do so only if the cuts are the same. That takes a
    piece that overlaps itself, such as "aaa", in a neighbourhood its own merges do not leave behind.) Only text can be
    joined: a text that spells a control or byte token stays text. What no piece covers becomes byte tokens.
    """
    scores = require_one_per_token(file, _SCORES_KEY, len(vocabulary.texts))
    pieces = vocabulary.ids_of(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED)
    merges = []
    for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]]):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(left, right) for left, right in cuts if left in pieces and right in pieces]
    fallback = {
        text: token_id
        for token_id, text in enumerate(vocabulary.texts)
        if vocabulary.types[token_id] in {TokenType.BYTE, TokenType.UNKNOWN}
    }
    unknown = next((text for text, i in fallback.items() if vocabulary.types[i] is TokenType.UNKNOWN), None)
    return tokenizers.Tokenizer(
        models.BPE({**pieces, **fallback}, merges, unk_token=unknown, fuse_unk=False, byte_fallback=True)
    )
