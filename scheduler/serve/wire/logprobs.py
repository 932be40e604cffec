r"""Log-probabilities in the three forms clients know: chat's, completions', and vLLM's for prompts.

Tokens are bytes and need not be whole characters. Where a form wants text for one, it is the text if the bytes are
UTF-8, else OpenAI's `bytes:\xf0\x9f`, which is unique and loses nothing.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence

import msgspec

from engine.batch import TokenLogprob, TokenLogprobs

TokenBytes = Callable[[int], bytes]

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot say."""


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a chat completion: one entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of a completion: parallel lists, one entry per token; null for a prompt's first token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct, frozen=True):
    """How likely a token was in its place; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


def token_text(data: bytes) -> str:
    """`data` as text if it is whole characters, else its bytes spelled out."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """`logprob`, or the lowest number that stands for minus infinity."""
    return max(logprob, LOWEST_LOGPROB)


def chat_logprobs(tokens: Iterable[TokenLogprobs], token_bytes: TokenBytes) -> ChatLogprobs:
    """Chat's form of each chosen token and its likeliest rivals."""

    def entry(token: TokenLogprob) -> ChatTopLogprob:
        data = token_bytes(token.token_id)
        return ChatTopLogprob(token_text(data), finite(token.logprob), list(data))

    content = []
    for token in tokens:
        data = token_bytes(token.token_id)
        top = [entry(rival) for rival in token.top]
        content.append(ChatTokenLogprob(token_text(data), finite(token.logprob), list(data), top))
    return ChatLogprobs(content)


class CompletionLog:
    """Completions' form for the tokens of one choice, as they come: it knows how much text came before.

    `hidden` are the ids of tokens that add nothing to the text.
    """

    def __init__(self, token_bytes: TokenBytes, hidden: frozenset[int] = frozenset(), offset: int = 0) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """The next tokens' entries."""
        log = CompletionLogprobs([], [], [], [])
        for token_id, chosen in zip(token_ids, logprobs, strict=True):
            data = self._token_bytes(token_id)
            log.tokens.append(token_text(data))
            log.text_offset.append(self._offset)
            if token_id not in self._hidden:
                self._offset += len(self._decoder.decode(data))
            if chosen is None:
                log.token_logprobs.append(None)
                log.top_logprobs.append(None)
            else:
                log.token_logprobs.append(finite(chosen.logprob))
                top = {token_text(self._token_bytes(rival.token_id)): finite(rival.logprob) for rival in chosen.top}
                log.top_logprobs.append(top | {token_text(data): finite(chosen.logprob)})
        return log


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The entries of both, in order."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(tokens: Iterable[TokenLogprobs | None], token_bytes: TokenBytes) -> PromptLogprobs:
    """The form vLLM gives prompts: per token a mapping from id to log-probability, for itself and its rivals."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(finite(logprob), rank, token_text(token_bytes(token_id)))

    form: PromptLogprobs = []
    for token in tokens:
        if token is None:
            form.append(None)
        else:
            rivals = {r.token_id: entry(r.token_id, r.logprob, rank) for rank, r in enumerate(token.top, 1)}
            form.append({token.token_id: entry(token.token_id, token.logprob, token.rank)} | rivals)
    return form
