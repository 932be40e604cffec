"""How tokens are chosen: plain data, validated once, no numpy."""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from engine.errors import ParamError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
"""Characters of a stop string. What is held back for one is searched anew with every character."""
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORD_TOKENS = 4096
"""Of all bad words together, which are compared with the end of the text for every token."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides which token follows and when to end; the defaults are OpenAI's.

    Greedy when `temperature` or `top_p` is 0. `top_k` of -1 or 0, `top_p`, `min_p` and `typical_p` at their defaults
    are off. `repetition_penalty` looks back `repeat_last_n` tokens, into the prompt too (-1: over all of them, 0: it is
    off); `presence_penalty` and `frequency_penalty` count generated tokens only. `bad_words` are token id sequences
    that must not be completed. `logprobs` is None for none, else how many of the likeliest tokens to report beside the
    chosen one. `max_tokens` None means up to the context.

    Raises `ParamError` naming the field, the value and the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None

    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_p == 0

    @property
    def penalizes_repetition(self) -> bool:
        """Whether tokens that came before are made less or more likely."""
        return self.repetition_penalty != 1 and self.repeat_last_n != 0

    def changes_logits(self, num_generated: int) -> bool:
        """Whether the token after `num_generated` may be chosen from other logits than the model's own."""
        may_not_end = num_generated < self.min_tokens and bool(self.stop_token_ids or not self.ignore_eos)
        is_penalized = self.penalizes_repetition or self.frequency_penalty != 0 or self.presence_penalty != 0
        return may_not_end or is_penalized or bool(self.logit_bias or self.allowed_token_ids or self.bad_words)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `ParamError` unless every token id named here is one of the vocabulary's."""
        check_token_ids("logit_bias", self.logit_bias, vocab_size)
        allowed = self.allowed_token_ids or ()
        _within("allowed_token_ids", len(allowed), 0, vocab_size, what="the number of allowed_token_ids")
        check_token_ids("allowed_token_ids", allowed, vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for word in self.bad_words:
            check_token_ids("bad_words", word, vocab_size)

    def check_leaves_a_token(self, eos_ids: AbstractSet[int]) -> None:
        """Raise `ParamError` if no token at all may come first."""
        if self.allowed_token_ids is None:
            return
        forbidden = {word[0] for word in self.bad_words if len(word) == 1}
        if self.min_tokens > 0:
            forbidden |= eos_ids | set(self.stop_token_ids)
        if forbidden.issuperset(self.allowed_token_ids):
            raise ParamError("allowed_token_ids", "bad_words and min_tokens together forbid all of allowed_token_ids")

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, math.inf)
        _within("top_k", self.top_k, -1, math.inf)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("typical_p", self.typical_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ParamError(
                "repetition_penalty", f"repetition_penalty must be finite and > 0, got {self.repetition_penalty}"
            )
        _within("repeat_last_n", self.repeat_last_n, -1, math.inf)
        for token_id, bias in self.logit_bias.items():
            _within(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParamError("allowed_token_ids", "allowed_token_ids must not be empty")
        if any(not word for word in self.bad_words):
            raise ParamError("bad_words", "bad_words must not contain an empty word")
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 0, math.inf)
        _within("min_tokens", self.min_tokens, 0, math.inf)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamError(
                "min_tokens", f"min_tokens must be <= max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if any(not stop for stop in self.stop):
            raise ParamError("stop", "stop must not contain an empty string")
        _within("stop", len(self.stop), 0, MAX_STOP_STRINGS, what="the number of stop strings")
        _within("stop", max(map(len, self.stop), default=0), 0, MAX_STOP_LENGTH, what="the length of a stop string")
        _within("stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKENS, what="the number of stop_token_ids")
        _within("logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIAS, what="the number of logit_bias entries")
        bad_word_tokens = sum(map(len, self.bad_words))
        _within("bad_words", bad_word_tokens, 0, MAX_BAD_WORD_TOKENS, what="the number of tokens in bad_words")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _within(name, count, 0, MAX_LOGPROBS)


def check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise `ParamError` naming `param` unless every id is one of the vocabulary's."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ParamError(param, f"{param}: token id {token_id} is not in [0, {vocab_size - 1}]")


def _within(
    name: str, value: float, low: float, high: float, *, param: str | None = None, what: str | None = None
) -> None:
    """Raise `ParamError` unless `value` is finite and low <= value <= high."""
    if math.isfinite(value) and low <= value <= high:
        return
    limit = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
    raise ParamError(param or name, f"{what or name} must be finite and {limit}, got {value}")
