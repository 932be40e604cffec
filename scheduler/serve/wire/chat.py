"""POST /v1/chat/completions: what is asked and what is answered."""

from datetime import datetime
from typing import Any

import msgspec

from engine.params import MAX_LOGPROBS
from scheduler.serve.wire.errors import invalid
from scheduler.serve.wire.generation import Answer, CallFields, ChoiceEnd
from scheduler.serve.wire.inert import refuse_unsupported
from scheduler.serve.wire.logprobs import ChatLogprobs
from scheduler.serve.wire.sampling import Integer

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_OWN_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "now", "bos_token", "eos_token"}
)

ASKS_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "return_prompt_text": (False,),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that are refused but for these values (besides null), which change nothing."""


class ChatFields(msgspec.Struct, kw_only=True):
    """A conversation and how the template is to render it. `chat_template_now` is what it is told the time is."""

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_now: datetime | None = None

    @property
    def wants_generation_prompt(self) -> bool:
        """Whether the prompt ends with the opening of the assistant's turn; by default unless one is continued."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @classmethod
    def of(cls, fields: msgspec.Struct) -> "ChatFields":
        """These fields of a Struct that has them among others: a Struct cannot inherit from two."""
        return ChatFields(**{name: getattr(fields, name) for name in ChatFields.__struct_fields__})

    def check_chat(self) -> None:
        """Raise `ApiError` for a conversation that cannot be rendered as asked."""
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message", "continue_final_message and add_generation_prompt cannot both be true"
            )
        taken = TEMPLATE_OWN_NAMES.intersection(self.chat_template_kwargs or ())
        if taken:
            raise invalid("chat_template_kwargs", f"chat_template_kwargs must not set {', '.join(sorted(taken))}")


class ChatRequest(CallFields, kw_only=True):
    """The body. Of the fields typed `object` only values that ask for nothing are taken."""

    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_now: datetime | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None

    add_special_tokens: object = None
    audio: object = None
    chat_template: object = None
    documents: object = None
    echo: object = None
    function_call: object = None
    functions: object = None
    media_io_kwargs: object = None
    mm_processor_kwargs: object = None
    modalities: object = None
    prediction: object = None
    reasoning_effort: object = None
    return_prompt_text: object = None
    thinking_token_budget: object = None
    tool_choice: object = None
    tools: object = None
    verbosity: object = None
    web_search_options: object = None

    def check(self) -> None:
        """Raise `ApiError` for values no Struct type and no `SamplingParams` refuses."""
        super().check()
        self.chat.check_chat()
        refuse_unsupported(self, ASKS_FOR_NOTHING)
        for name in ("max_tokens", "max_completion_tokens", "n_predict"):
            if getattr(self, name) == 0:
                raise invalid(name, f"{name} must be >= 1 for a chat completion, got 0")
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise invalid("top_logprobs", f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {self.top_logprobs}")
            if not self.logprobs and self.top_logprobs:
                raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")

    @property
    def chat(self) -> ChatFields:
        """What concerns the template."""
        return ChatFields.of(self)

    @property
    def num_logprobs(self) -> int | None:
        """How many rivals of each token to report, None to report nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


def normalised(messages: list[Message] | None) -> list[Message]:
    """The messages as templates know them: `content` a string everywhere, `developer` said as `system`.

    Raises `ApiError` naming `messages` and the place.
    """
    if not messages:
        raise invalid("messages", "messages must be a list of at least one message")
    return [_normalised(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalised(message: Message, place: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        given = "is missing" if role is None else f"must be one of {', '.join(ROLES)}"
        raise invalid("messages", f"{place}.role {given}")
    content = _text(message.get("content"), f"{place}.content")
    if content is None:
        # An assistant that called tools said nothing; templates that add strings must not meet a null.
        if role != "assistant":
            raise invalid("messages", f"{place}.content is missing: it must be a string or a list of text parts")
        content = ""
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _text(content: Any, place: str) -> str | None:
    """`content` as one string; None if there is none."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("messages", f"{place} must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid("messages", f"{place}[{index}] must be an object with a type")
        if part["type"] != "text":
            raise invalid(
                "messages", f"{place}[{index}]: {part['type']} parts are not supported, only text", code="unsupported"
            )
        if not isinstance(part.get("text"), str):
            raise invalid("messages", f"{place}[{index}].text must be a string")
        texts.append(part["text"])
    return "".join(texts) if texts else None


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the assistant said."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    """The next piece of it; the role comes once, first."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(ChoiceEnd, kw_only=True):
    """One choice, whole."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(ChoiceEnd, kw_only=True):
    """The next piece of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Answer, kw_only=True):
    """A whole answer."""

    object: str = "chat.completion"
    choices: list[ChatChoice]


class ChatChunk(Answer, kw_only=True):
    """One event of a streamed answer."""

    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
