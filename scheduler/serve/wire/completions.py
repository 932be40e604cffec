"""POST /v1/completions: what is asked and what is answered."""

from typing import Any

import msgspec

from engine.params import MAX_LOGPROBS
from scheduler.serve.wire.errors import invalid
from scheduler.serve.wire.generation import Answer, CallFields, ChoiceEnd
from scheduler.serve.wire.inert import refuse_unsupported
from scheduler.serve.wire.logprobs import CompletionLogprobs, PromptLogprobs
from scheduler.serve.wire.sampling import Integer


class CompletionRequest(CallFields, kw_only=True):
    """The body. `prompt` has several shapes: `prompts_of` tells them apart."""

    prompt: Any = None
    logprobs: Integer | None = None
    echo: bool | None = None

    add_special_tokens: bool | None = None
    best_of: Integer | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raise `ApiError` for values no Struct type and no `SamplingParams` refuses."""
        super().check()
        refuse_unsupported(self, {"suffix": ("",), "best_of": (self.num_choices,), "add_special_tokens": (True,)})
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise invalid("logprobs", f"logprobs must be in [0, {MAX_LOGPROBS}], got {self.logprobs}")


class CompletionChoice(ChoiceEnd, kw_only=True):
    """One choice, whole or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(Answer, kw_only=True):
    """A whole answer or, in a stream, one chunk of it."""

    object: str = "text_completion"
    choices: list[CompletionChoice]
