"""What an answer cost: tokens as OpenAI counts them, time as llama-server and as vLLM report it."""

import msgspec

from scheduler.events import PromptProgress, Timings, Usage


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
    """llama-server's names, milliseconds and tokens per second, and the time in the queue. Null where nothing ran."""

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None

    @classmethod
    def of(cls, timings: Timings, usage: Usage) -> "WireTimings":
        """`timings` on the wire; rates need the counts in `usage`."""
        return cls(
            queue_ms=_ms(timings.queue_s),
            cache_n=0,
            prompt_n=usage.prompt_tokens,
            prompt_ms=_ms(timings.prefill_s),
            prompt_per_token_ms=_ms_each(timings.prefill_s, usage.prompt_tokens),
            prompt_per_second=_rate(usage.prompt_tokens, timings.prefill_s),
            predicted_n=usage.completion_tokens,
            predicted_ms=_ms(timings.decode_s),
            predicted_per_token_ms=_ms_each(timings.decode_s, usage.completion_tokens),
            predicted_per_second=_rate(usage.completion_tokens, timings.decode_s),
        )


class WireMetrics(msgspec.Struct, frozen=True):
    """vLLM's names, in milliseconds: waiting, then the prompt, then the answer; they add up to `e2e_time_ms`.

    `time_to_first_token_ms` begins when the request has its slot. `mean_itl_ms` is null where there are no two tokens,
    or several choices. Several prompts: of the one that took longest.
    """

    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float
    e2e_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None

    @classmethod
    def of(cls, timings: Timings, usage: Usage, num_choices: int) -> "WireMetrics":
        """`timings` on the wire; the means need the counts."""
        parts = _ms(timings.queue_s), _ms(timings.prefill_s), _ms(timings.decode_s)
        gaps = usage.completion_tokens - 1 if num_choices == 1 else 0
        return cls(
            queue_time_ms=parts[0],
            time_to_first_token_ms=parts[1],
            generation_time_ms=parts[2],
            e2e_time_ms=round(sum(parts), 3),
            mean_itl_ms=_ms(timings.decode_s / gaps) if gaps > 0 else None,
            tokens_per_second=_rate(usage.completion_tokens, timings.decode_s),
        )


class WireProgress(msgspec.Struct, frozen=True):
    """How far the computing of a prompt is, as llama-server tells it: tokens, and milliseconds since it began."""

    total: int
    cache: int
    processed: int
    time_ms: float

    @classmethod
    def of(cls, progress: PromptProgress) -> "WireProgress":
        """`progress` on the wire."""
        return cls(progress.num_prompt, 0, progress.num_computed, _ms(progress.elapsed_s))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _ms_each(seconds: float, count: int) -> float | None:
    return _ms(seconds / count) if count else None


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if count and seconds > 0 else None
