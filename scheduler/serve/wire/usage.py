"""What an answer cost: tokens as OpenAI counts them, time as llama-server reports it."""

import msgspec

from scheduler.events import Timings, Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens were not computed again."""

    cached_tokens: int = 0


class WireUsage(msgspec.Struct, frozen=True):
    """The prompt counts once whatever `n`; `completion_tokens` has every sampled token, EOS included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()

    @classmethod
    def of(cls, usage: Usage) -> "WireUsage":
        """`usage` on the wire."""
        return cls(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


class WireTimings(msgspec.Struct, frozen=True):
    """llama-server's names, milliseconds and tokens per second, and the time in the queue. None where nothing ran."""

    queue_ms: float
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None

    @classmethod
    def of(cls, timings: Timings, usage: Usage) -> "WireTimings":
        """`timings` on the wire; rates need the counts in `usage`."""
        return cls(
            queue_ms=_ms(timings.queue_s),
            prompt_n=usage.prompt_tokens,
            prompt_ms=_ms(timings.prefill_s),
            prompt_per_second=_rate(usage.prompt_tokens, timings.prefill_s),
            predicted_n=usage.completion_tokens,
            predicted_ms=_ms(timings.decode_s),
            predicted_per_second=_rate(usage.completion_tokens, timings.decode_s),
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds > 0 else None
