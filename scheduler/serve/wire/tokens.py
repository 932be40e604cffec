"""Text to tokens and back, and conversations to prompts, without an answer: vLLM's forms and llama-server's."""

from datetime import datetime
from typing import Any

import msgspec

from scheduler.serve.wire.chat import ChatFields


class TokenizeRequest(ChatFields, kw_only=True):
    """A text or a conversation: one of `prompt`, `messages` (vLLM's form) and `content` (llama-server's).

    `add_special_tokens` (by default true) with `prompt`, and `add_special` (by default false) with `content`, put BOS
    before the text where the model's file says so. With `content`, control tokens are parsed unless `parse_special` is
    false, and `with_pieces` reports the text of each token.
    """

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenPiece(msgspec.Struct, kw_only=True):
    """A token and its text, as its bytes where they are no whole characters."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, kw_only=True):
    """The ids of what was given, with `with_pieces` and the text of each."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: Any = None


class Detokenized(msgspec.Struct, kw_only=True):
    """Their text, control tokens included, by vLLM's name and by llama-server's."""

    prompt: str
    content: str


class TemplateRequest(ChatFields, kw_only=True):
    """A conversation."""

    model: str | None = None


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """The conversation as the chat template writes it. Text in a message may look like a control token and be none."""

    prompt: str


class RenderedIds(msgspec.Struct, kw_only=True):
    """The prompt a chat completion would have, as vLLM tells it, and how many tokens its answer may have."""

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    max_tokens: int
    priority: int
    chat_template_now: datetime
