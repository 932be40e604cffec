"""From sampled tokens to the text a client sees: decoding, stop strings, and which tokens a piece of text completes."""

from collections import deque
from typing import Protocol

from engine.batch import RowError, Sampled
from engine.detokenizer import IncrementalDecoder, TokenBytes
from engine.stop import StopChecker
from scheduler.events import Delta, Token
from scheduler.request import Request


class Output(Protocol):
    """One choice's way out: the core pushes every sampled token, then flushes once at the end."""

    @property
    def matched(self) -> str | None:
        """The stop string that completed, if one has: nothing is released after it."""

    def push(self, sampled: Sampled, *, hidden: bool) -> Delta | RowError | None:
        """What this token releases, if anything. The text of a `hidden` one is never shown (it ended the choice)."""

    def flush(self) -> Delta | RowError | None:
        """Everything still held back."""


class TokensOnly:
    """An output without text: every token is released as it comes."""

    matched = None

    def __init__(self, request: Request, index: int) -> None:
        self._request_id = request.id
        self._index = index

    def push(self, sampled: Sampled, *, hidden: bool) -> Delta:  # noqa: ARG002 - there is no text to hide
        """The token, with no text."""
        return Delta(self._request_id, self._index, "", (Token(sampled.token_id, sampled.logprobs),))

    def flush(self) -> None:
        """Nothing: nothing is held back."""


class TextOutput:
    """Text as soon as it is final, with the tokens it completes.

    A token is released with the last of its text; one that completes no text (half a character, a control token) goes
    with the next that does. Stop strings are looked for in what becomes final after the first
    `min_tokens` tokens. Whatever the tokenizer or the stop checker raises comes back as a `RowError`: it concerns this
    request alone.
    """

    def __init__(self, request: Request, index: int, tokenizer: TokenBytes) -> None:
        params = request.params
        self._request_id = request.id
        self._index = index
        self._decoder = IncrementalDecoder(tokenizer, skip_special=params.skip_special_tokens)
        self._checker = StopChecker(params.stop, include_stop=params.include_stop_str_in_output)
        self._num_unchecked = params.min_tokens
        self._textless: list[Token] = []
        self._held: deque[tuple[int, Token]] = deque()
        """Tokens with text not wholly released, each with the number of characters up to its end."""
        self._num_decoded = 0
        self._num_released = 0

    @property
    def matched(self) -> str | None:
        """The stop string that completed, if one has."""
        return self._checker.matched

    def push(self, sampled: Sampled, *, hidden: bool) -> Delta | RowError | None:
        """The text this token makes final, with the tokens that text completes."""
        self._textless.append(Token(sampled.token_id, sampled.logprobs))
        if hidden:
            return None
        try:
            return self._delta(self._released(self._decoder.push(sampled.token_id)))
        except Exception as fault:  # noqa: BLE001 - whatever one request's text raises must not reach the others
            return RowError("the server failed to turn a token into text", fault)

    def flush(self) -> Delta | RowError | None:
        """Everything still held back, and every token not yet released."""
        try:
            text = ""
            if self.matched is None:
                text = self._released(self._decoder.flush())
                text += self._checker.flush()
        except Exception as fault:  # noqa: BLE001 - as above
            return RowError("the server failed to finish the text", fault)
        tokens = (*(token for _, token in self._held), *self._textless)
        self._held.clear()
        self._textless.clear()
        return Delta(self._request_id, self._index, text, tokens) if text or tokens else None

    def _released(self, piece: str) -> str:
        """What may be shown now that `piece` has been decoded."""
        if piece:
            self._num_decoded += len(piece)
            self._held.extend((self._num_decoded, token) for token in self._textless)
            self._textless.clear()
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return piece
        return self._checker.push(piece)

    def _delta(self, text: str) -> Delta | None:
        """`text` with the tokens whose last character it holds."""
        self._num_released += len(text)
        tokens = []
        while self._held and self._held[0][0] <= self._num_released:
            tokens.append(self._held.popleft()[1])
        return Delta(self._request_id, self._index, text, tuple(tokens)) if text or tokens else None
