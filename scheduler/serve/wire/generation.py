"""What /v1/completions and /v1/chat/completions share beyond sampling, in requests and in answers."""

import msgspec

from scheduler.serve.wire.errors import invalid
from scheduler.serve.wire.logprobs import PromptLogprobs
from scheduler.serve.wire.sampling import GenerationFields, Integer, refuse_unsupported
from scheduler.serve.wire.usage import WireTimings, WireUsage


class StreamOptions(msgspec.Struct):
    """Whether token counts come at the end of a stream, and with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


ASKS_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "grammar": ("",),
    "json_schema": (),
    "logits_processors": ([],),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
"""Fields nothing is done about, each with the values (besides null) that change nothing."""


class CallFields(GenerationFields, kw_only=True):
    """The body of a call for one answer, plain or streamed."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    guided_choice: object = None
    guided_grammar: object = None
    guided_json: object = None
    guided_regex: object = None
    grammar: object = None
    json_schema: object = None
    logits_processors: object = None
    priority: Integer | None = None
    response_format: object = None
    structured_outputs: object = None
    use_beam_search: object = None

    def check(self) -> None:
        """Raise `ApiError` for values no Struct type and no `SamplingParams` refuses."""
        super().check()
        refuse_unsupported(self, ASKS_FOR_NOTHING)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid(
                "prompt_logprobs", "prompt_logprobs is not supported with stream", code="unsupported_parameter"
            )


class Answer(msgspec.Struct, kw_only=True):
    """What whole answers and their chunks have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: WireUsage | msgspec.UnsetType | None = msgspec.UNSET
    timings: WireTimings | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChoiceEnd(msgspec.Struct, kw_only=True):
    """How a choice ended, with the seed that gives the same answer again."""

    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
