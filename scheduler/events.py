"""What a request's consumer sees: `Started`, any number of `Delta`s, one `ChoiceFinished` per choice, `Finished`.

`PromptProgress` and `PromptScored` come before the first `Delta`, to who asks for them. `Finished` is last and comes
exactly once for every submitted request, whatever happened to it.
"""

import msgspec

from engine.batch import TokenLogprobs
from scheduler.request import FinishReason


class Token(msgspec.Struct, frozen=True):
    """One sampled token whose text has been released (a control token or half a character has none of its own)."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Started(msgspec.Struct, frozen=True):
    """The request left the queue: its first choice has a slot, and takes part in one of the next ticks."""

    request_id: str
    queue_s: float


class PromptProgress(msgspec.Struct, frozen=True):
    """So many tokens of the prompt have been computed, `elapsed_s` after the request left the queue."""

    request_id: str
    num_prompt: int
    num_computed: int
    elapsed_s: float


class PromptScored(msgspec.Struct, frozen=True):
    """The prompt has been scored: one entry per token, None for the first; of one that was ended, as far as it was."""

    request_id: str
    logprobs: tuple[TokenLogprobs | None, ...]


class Delta(msgspec.Struct, frozen=True):
    """Text of one choice that is final, with the tokens that completed it. Either may be empty, not both."""

    request_id: str
    index: int
    text: str
    tokens: tuple[Token, ...]


class ChoiceFinished(msgspec.Struct, frozen=True):
    """One choice is over. `stop_reason` is the stop string or stop token id that matched, None for EOS and the rest."""

    request_id: str
    index: int
    reason: FinishReason
    stop_reason: str | int | None
    num_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """Where a request's time went, in seconds: the three add up to `e2e_s`. TTFT is None if no token came."""

    queue_s: float
    prefill_s: float
    decode_s: float
    e2e_s: float
    ttft_s: float | None


class Usage(msgspec.Struct, frozen=True):
    """Tokens counted as OpenAI does: the prompt once whatever `n`, every token of every choice, EOS included.

    Of a request that was ended before its prompt was computed, only the part that was: the rest cost nothing.
    """

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class Finished(msgspec.Struct, frozen=True):
    """The one terminal event.

    `reason` is error if any choice failed (`error` says why in plain words, `cause` is the exception, for the log),
    abort if it was cancelled, length if any choice ran out of room, else stop; `choice_reasons` are the choices' own.
    `prompt_logprobs` has one entry per prompt token, None for the first, if the request asked for them; fewer if it was
    ended before.
    """

    request_id: str
    reason: FinishReason
    choice_reasons: tuple[FinishReason, ...]
    usage: Usage
    timings: Timings
    error: str | None = None
    cause: Exception | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


Event = Started | PromptProgress | PromptScored | Delta | ChoiceFinished | Finished
