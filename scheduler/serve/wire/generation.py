"""What /v1/completions and /v1/chat/completions share beyond sampling, in requests and in answers."""

import math
from datetime import datetime

import msgspec

from scheduler.serve.wire.errors import invalid
from scheduler.serve.wire.inert import InertFields
from scheduler.serve.wire.logprobs import PromptLogprobs
from scheduler.serve.wire.sampling import Integer
from scheduler.serve.wire.usage import WireMetrics, WireProgress, WireTimings, WireUsage


class StreamOptions(msgspec.Struct):
    """Whether token counts come at the end of a stream, and with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CallFields(InertFields, kw_only=True):
    """The body of a call for one answer, plain or streamed.

    `n_predict` and `repeat_penalty` are llama-server's names for `max_tokens` and `repetition_penalty`, which win over
    them; `n_predict` -1 is no limit. `timings_per_token` puts the timings so far into every chunk of a stream, and
    `return_progress` makes a chunk of every piece of the prompt that has been computed.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    n_predict: Integer | None = None
    repeat_penalty: float | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """How many tokens may be generated, None for as many as fit, by the first of its three names that is given."""
        limit = super().token_limit
        if limit is None and self.n_predict is not None and self.n_predict >= 0:
            return self.n_predict
        return limit

    @property
    def penalty(self) -> float | None:
        """The repetition penalty, by the first of its names that is given."""
        return self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty

    def check(self) -> None:
        """Raise `ApiError` for values no Struct type and no `SamplingParams` refuses."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options needs stream to be true")
        if self.n_predict is not None and self.n_predict < -1:
            raise invalid("n_predict", f"n_predict must be >= -1, got {self.n_predict}")
        if self.repeat_penalty is not None and not (math.isfinite(self.repeat_penalty) and self.repeat_penalty > 0):
            raise invalid("repeat_penalty", f"repeat_penalty must be finite and > 0, got {self.repeat_penalty}")


class Answer(msgspec.Struct, kw_only=True):
    """What whole answers and their chunks have in common.

    `timings` (llama-server's form) and `metrics` (vLLM's) come with a whole answer and with the last choice's end in a
    stream. `chat_template_now` is what the chat template was told the time is: sent again, it makes the same prompt.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: WireUsage | msgspec.UnsetType | None = msgspec.UNSET
    timings: WireTimings | msgspec.UnsetType = msgspec.UNSET
    metrics: WireMetrics | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: WireProgress | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    chat_template_now: datetime | msgspec.UnsetType = msgspec.UNSET


class ChoiceEnd(msgspec.Struct, kw_only=True):
    """How a choice ended, with the seed that gives the same answer again."""

    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
