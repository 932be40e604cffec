"""Token ids to text, one id at a time, never half a character."""

import codecs
from collections.abc import Set as AbstractSet
from typing import Protocol


class TokenBytes(Protocol):
    """What a decoder needs of a tokenizer: the bytes of a token, and which tokens are control tokens."""

    @property
    def special_ids(self) -> AbstractSet[int]:
        """Ids of the control tokens."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes this token adds to the text."""


class IncrementalDecoder:
    """Text of a growing sequence of tokens, released as soon as it can no longer change.

    The pieces joined, `flush` included, equal `b"".join(token bytes).decode(errors="replace")` over all ids. Between
    pushes at most three bytes are kept: the beginning of a character. With `skip_special`, control tokens have no text.
    """

    def __init__(self, tok: TokenBytes, *, skip_special: bool = True) -> None:
        self._tok = tok
        self._skipped: AbstractSet[int] = tok.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that became final with this token; empty while a character is unfinished."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tok.token_bytes(token_id))

    def flush(self) -> str:
        """The end of the text: one U+FFFD if a character was cut, else nothing. The decoder is as new afterwards."""
        return self._utf8.decode(b"", final=True)
