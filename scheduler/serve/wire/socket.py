"""The JSON socket's lines, in both directions. `docs/socket-protocol.md` explains them."""

from datetime import datetime
from typing import Annotated, Any

import msgspec

from engine.params import MAX_LOGPROBS
from scheduler.request import FinishReason
from scheduler.serve.wire.chat import ChatFields, Message
from scheduler.serve.wire.errors import ErrorBody, invalid
from scheduler.serve.wire.logprobs import ChatTokenLogprob, PromptLogprobs
from scheduler.serve.wire.sampling import GenerationFields, Integer
from scheduler.serve.wire.usage import WireTimings, WireUsage

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | Integer
"""Chosen by the client; every event of the request carries it."""


class Generate(GenerationFields, kw_only=True, tag_field="op", tag="generate", forbid_unknown_fields=True):
    """Ask for text that goes on from `prompt` (text or token ids) or answers `messages`: one of the two.

    `logprobs` is how many of the likeliest tokens to report beside each chosen one.
    """

    id: Id
    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_now: datetime | None = None
    logprobs: Integer | None = None

    def check(self) -> None:
        """Raise `ApiError` for values no Struct type and no `SamplingParams` refuses."""
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "either prompt or messages is required, and not both")
        if self.messages is not None and self.token_limit == 0:
            raise invalid(self.token_limit_field, f"{self.token_limit_field} must be >= 1 with messages, got 0")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise invalid("logprobs", f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}")

    @property
    def chat(self) -> ChatFields:
        """What concerns the template."""
        return ChatFields(**{name: getattr(self, name) for name in ChatFields.__struct_fields__})


class Cancel(msgspec.Struct, kw_only=True, tag_field="op", tag="cancel", forbid_unknown_fields=True):
    """End a request of this connection; it still gets its `finished`. An id that is not running is no error."""

    id: Id


class Auth(msgspec.Struct, kw_only=True, tag_field="op", tag="auth", forbid_unknown_fields=True):
    """Present an API key; the first line where the server has keys. Answered only if it is refused."""

    key: str


Operation = Generate | Cancel | Auth


class StartedEvent(msgspec.Struct, kw_only=True, tag_field="event", tag="started"):
    """The request got a slot after `queue_s` seconds. With the same `seed`, the same answer comes again.

    With `messages`, `chat_template_now` is what the template was told the time is; sent again, the prompt is the same.
    """

    id: Id
    request_id: str
    model: str
    system_fingerprint: str
    prompt_tokens: int
    seed: int
    queue_s: float
    chat_template_now: datetime | msgspec.UnsetType = msgspec.UNSET


class TextEvent(msgspec.Struct, kw_only=True, tag_field="event", tag="text"):
    """The next piece of choice `index`, and the tokens that completed it. Either may be empty, not both."""

    id: Id
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[ChatTokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class ChoiceEnding(msgspec.Struct, kw_only=True):
    """How choice `index` ended; `stop_reason` is the stop string or stop token id that matched, if one did."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    completion_tokens: int


class FinishedEvent(msgspec.Struct, kw_only=True, tag_field="event", tag="finished"):
    """The last event of a request that did not fail."""

    id: Id
    finish_reason: FinishReason
    choices: list[ChoiceEnding]
    usage: WireUsage
    timings: WireTimings
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ErrorEvent(msgspec.Struct, kw_only=True, tag_field="event", tag="error"):
    """With an `id`: the last event of that request. Without: a line that could not be taken."""

    id: Id | None
    error: ErrorBody


SocketEvent = StartedEvent | TextEvent | FinishedEvent | ErrorEvent
