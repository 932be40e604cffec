"""One request, no scheduler: the slow, obviously correct twin of serving."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

import msgspec

from engine.batch import Chunk, Sampled, TokenLogprobs
from engine.detokenizer import IncrementalDecoder
from engine.errors import ContextLengthError, ParamError
from engine.kernels.protocol import Cache
from engine.model import Model
from engine.params import SamplingParams
from engine.sampler import request_rng, sample
from engine.stop import StopChecker
from engine.tokenizer import Tokenizer


class GenerationTimings(msgspec.Struct, frozen=True):
    """Seconds by the clock handed in: until the first token was chosen, and from there to the end."""

    prefill_s: float
    decode_s: float


class GenerationStats(msgspec.Struct, frozen=True):
    """What was done. `num_rows` are tokens that went through the model; completion tokens include the EOS."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_forwards: int
    num_rows: int


class Generation(msgspec.Struct, frozen=True):
    """An answer. The EOS or stop token that ended it is in neither `text` nor `ids` nor `logprobs`.

    `logprobs` has an entry for each id if the params asked for them, else it is None; `timings` is None without a
    clock.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    timings: GenerationTimings | None
    stats: GenerationStats
    finish_reason: Literal["stop", "length"]


def generate(
    model: Model,
    tok: Tokenizer,
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    cache: Literal["none", "contiguous"] | Cache = "contiguous",
    kv_dtype: str = "float32",
    choice: int = 0,
    on_text: Callable[[str], None] | None = None,
    eos_ids: AbstractSet[int] | None = None,
    clock: Callable[[], float] | None = None,
) -> Generation:
    """The answer to `prompt`: bit for bit what serving it gives, whatever else is served.

    With a `cache` the model sees the prompt once and then each new token; slot 0 of one handed in is written from its
    beginning. With "none" everything is computed again for every token. `on_text` is called with each piece of text
    that is final; `eos_ids` None are the tokenizer's; a seed of None is 0, and `choice` is which of several independent
    answers to one request this is.

    Raises `ParamError` for an empty prompt, a token id out of range or a dtype that is none (the sampler's included),
    `ContextLengthError` for a prompt that fills the context, and `LogitsError` for logits nothing can be drawn from.
    """
    prompt_ids = tuple(tok.encode(prompt) if isinstance(prompt, str) else prompt)
    limit = _token_limit(model, prompt_ids, params, cache)
    store = model.new_cache(1, len(prompt_ids) + limit, kv_dtype) if isinstance(cache, str) else cache
    ends = frozenset(tok.eos_ids if eos_ids is None else eos_ids)
    rng = request_rng(params.seed or 0, choice)
    text = _Text(tok, params, on_text)
    output_ids: list[int] = []
    shown: list[Sampled] = []
    finish_reason: Literal["stop", "length"] = "length"
    num_rows = 0
    t_start = t_first = clock() if clock else 0.0

    while len(output_ids) < limit:
        sequence = (*prompt_ids, *output_ids)
        start = len(sequence) - 1 if output_ids and cache != "none" else 0
        logits = model.forward((Chunk(0, start, sequence[start:]),), store)
        num_rows += len(sequence) - start
        sampled = sample(logits[0], params, output_ids, rng, prompt_ids, eos_ids=ends)
        output_ids.append(sampled.token_id)
        if clock and len(output_ids) == 1:
            t_first = clock()

        is_eos = sampled.token_id in ends and not params.ignore_eos
        is_stop_token = sampled.token_id in params.stop_token_ids
        if not is_eos and (not is_stop_token or params.include_stop_str_in_output):
            shown.append(sampled)
            text.push(sampled.token_id)
        if is_eos or is_stop_token or text.has_stopped:
            finish_reason = "stop"
            break

    text.flush()
    if text.has_stopped:
        finish_reason = "stop"
    return Generation(
        text="".join(text.pieces),
        ids=tuple(sampled.token_id for sampled in shown),
        logprobs=None if params.logprobs is None else tuple(s.logprobs for s in shown if s.logprobs is not None),
        timings=GenerationTimings(t_first - t_start, clock() - t_first) if clock else None,
        stats=GenerationStats(len(prompt_ids), len(output_ids), len(output_ids), num_rows),
        finish_reason=finish_reason,
    )


def _token_limit(model: Model, prompt_ids: Sequence[int], params: SamplingParams, cache: str | Cache) -> int:
    """The most tokens that may follow the prompt; raises `ParamError` or `ContextLengthError`."""
    context = model.config.max_context
    if not isinstance(cache, str):
        context = min(context, cache.max_len)
    elif cache not in ("none", "contiguous"):
        raise ParamError("cache", f"cache must be 'none', 'contiguous' or a cache, got {cache!r}")
    if not prompt_ids:
        raise ParamError("prompt", "prompt must have at least one token")
    if len(prompt_ids) >= context:
        raise ContextLengthError(len(prompt_ids), context)
    room = context - len(prompt_ids)
    return room if params.max_tokens is None else min(room, params.max_tokens)


class _Text:
    """Token ids to text, up to the first stop string found in what follows the first `min_tokens` tokens."""

    def __init__(self, tok: Tokenizer, params: SamplingParams, on_text: Callable[[str], None] | None) -> None:
        self.pieces: list[str] = []
        self._on_text = on_text
        self._num_unchecked = params.min_tokens
        self._decoder = IncrementalDecoder(tok, skip_special=params.skip_special_tokens)
        self._checker = StopChecker(params.stop, include_stop=params.include_stop_str_in_output)

    @property
    def has_stopped(self) -> bool:
        return self._checker.matched is not None

    def push(self, token_id: int) -> None:
        self._release(self._checked(self._decoder.push(token_id)))

    def flush(self) -> None:
        if not self.has_stopped:
            self._release(self._checked(self._decoder.flush()) + self._checker.flush())

    def _checked(self, piece: str) -> str:
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return piece
        return self._checker.push(piece)

    def _release(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            if self._on_text:
                self._on_text(piece)
