"""llama-server's own endpoints: what is asked and what is answered."""

from typing import Any, Literal, Self

import msgspec

from engine.params import MAX_LOGPROBS, SamplingParams
from scheduler.serve.wire.errors import invalid
from scheduler.serve.wire.generation import CallFields
from scheduler.serve.wire.inert import refuse_unsupported
from scheduler.serve.wire.prompt import ids_of_json
from scheduler.serve.wire.sampling import Integer
from scheduler.serve.wire.usage import WireMetrics, WireProgress, WireTimings

LOWEST_BIAS = -100.0
"""What `false` is as a bias, too: the token never comes."""
HIGHEST_BIAS = 100.0

DEFAULTS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_last_n": 64,
}
"""Where llama-server's defaults are not ours."""


class LlamaRequest(CallFields, kw_only=True):
    """The body of POST /completion, with llama-server's defaults: `DEFAULTS` in place of ours, no seed if it is -1.

    `prompt` is a text or token ids. `n_probs` is how many of the likeliest tokens to report beside each. `logit_bias`
    is an object, or a list of pairs of a token id or a text, all of whose tokens are meant, and a number or false.
    `return_tokens` reports the ids of an answer that is not streamed. There is one choice, and a stream's last chunk
    always has the counts. All else is as in /v1/completions.
    """

    prompt: Any = None
    logit_bias: Any = None
    n_probs: Integer | None = None
    return_tokens: bool | None = None

    def __post_init__(self) -> None:
        for name, default in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        if self.seed == -1:
            self.seed = None

    def check(self) -> None:
        """Raise `ApiError` for values no Struct type and no `SamplingParams` refuses."""
        super().check()
        refuse_unsupported(self, {"n": (1,), "prompt_logprobs": (), "stream_options": ()})
        if self.n_probs is not None and not 0 <= self.n_probs <= MAX_LOGPROBS:
            raise invalid("n_probs", f"n_probs must be in [0, {MAX_LOGPROBS}], got {self.n_probs}")

    @property
    def given_prompt(self) -> str | list[int]:
        """The prompt. Raises `ApiError` for anything but a text or token ids."""
        if isinstance(self.prompt, str) and self.prompt:
            return self.prompt
        if isinstance(self.prompt, list) and self.prompt:
            return ids_of_json(self.prompt, "prompt")
        raise invalid("prompt", "prompt must be a text or token ids: use /v1/completions for several prompts")


class LlamaSampling(msgspec.Struct, kw_only=True):
    """How tokens are chosen and when an answer ends, under llama-server's names; nothing a client wrote is in it.

    A `seed` of -1 is yet to be drawn; `max_tokens` and `n_predict` are the same limit, -1 for none.
    """

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    n_predict: int
    n_probs: int
    ignore_eos: bool

    @classmethod
    def of(cls, params: SamplingParams, **more: Any) -> Self:
        """`params` on the wire, with the fields that a kind of settings has beyond them."""
        same = {name: getattr(params, name) for name in cls.__struct_fields__ if name in params.__struct_fields__}
        limit = -1 if params.max_tokens is None else params.max_tokens
        same |= {"max_tokens": limit, "seed": -1 if params.seed is None else params.seed}
        return cls(
            **same, **more, n_predict=limit, n_probs=params.logprobs or 0, repeat_penalty=params.repetition_penalty
        )


class LlamaSettings(LlamaSampling, kw_only=True):
    """What an answer was generated with. With this `seed` the same answer comes again."""

    n_ctx: int
    stop: tuple[str, ...]
    stream: bool


class LlamaProb(msgspec.Struct, kw_only=True):
    """One likely token."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaTokenProbs(LlamaProb, kw_only=True):
    """The chosen token and the likeliest ones."""

    top_logprobs: list[LlamaProb]


class LlamaAnswer(msgspec.Struct, kw_only=True):
    """A whole answer, or one chunk of it; all but the last chunk of a stream end with `tokens_evaluated`.

    `stop_type` is `none` if the call was aborted; `stopping_word` is the stop string that matched, or the text of the
    stop token. `truncated` says that the context was full. `id`, `system_fingerprint` and `metrics` are additions.
    """

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    timings: WireTimings | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: WireProgress | msgspec.UnsetType = msgspec.UNSET
    completion_probabilities: list[LlamaTokenProbs] | msgspec.UnsetType = msgspec.UNSET

    id: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET
    generation_settings: LlamaSettings | msgspec.UnsetType = msgspec.UNSET
    prompt: str | msgspec.UnsetType = msgspec.UNSET
    has_new_line: bool | msgspec.UnsetType = msgspec.UNSET
    truncated: bool | msgspec.UnsetType = msgspec.UNSET
    stop_type: Literal["none", "eos", "limit", "word"] | msgspec.UnsetType = msgspec.UNSET
    stopping_word: str | msgspec.UnsetType = msgspec.UNSET
    tokens_cached: int | msgspec.UnsetType = msgspec.UNSET
    metrics: WireMetrics | msgspec.UnsetType = msgspec.UNSET


class Modalities(msgspec.Struct, kw_only=True):
    """What besides text a prompt may hold."""

    vision: bool = False
    video: bool = False
    audio: bool = False


class DefaultSettings(msgspec.Struct, kw_only=True):
    """What /completion does unless told otherwise, and the positions of a slot."""

    params: LlamaSampling
    n_ctx: int


class Props(msgspec.Struct, kw_only=True):
    """What the server serves. `chat_template` is empty where the model has none."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    system_fingerprint: str
