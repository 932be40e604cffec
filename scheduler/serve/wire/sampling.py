"""The fields every way of asking for text has in common, under OpenAI's and vLLM's names, and what they mean.

`null` is the same as not there.
"""

import re
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from engine.params import SamplingParams
from scheduler.seed import draw_seed
from scheduler.serve.wire.errors import invalid

MAX_CHOICES = 128
MAX_PROMPT_ENTRIES = 2**20
"""Log-probabilities of prompts in one answer: so many are about 25 MB."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 1024

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Encode = Callable[[str], list[int]]

_REQUEST_ID = re.compile(r"[\w.:\-]{1,128}", re.ASCII)


class GenerationFields(msgspec.Struct, kw_only=True):
    """What decides how the answer is generated; a prompt of some kind is added by each subclass.

    `repeat_last_n` is how many tokens the repetition penalty looks back, -1 for all. Of the requests that wait, those
    with a lower `priority` start first. Of a prompt longer than `truncate_prompt_tokens` the last so many tokens are
    kept, with -1 as many as leave room for the answer.
    """

    n: Integer | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    min_tokens: Integer | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Integer | None = None

    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    request_id: str | None = None
    priority: Integer | None = None

    @property
    def num_choices(self) -> int:
        """How many answers are wanted."""
        return 1 if self.n is None else self.n

    @property
    def token_limit(self) -> int | None:
        """How many tokens may be generated, None for as many as fit; `max_completion_tokens` wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_field(self) -> str:
        """The field `token_limit` came from, for messages."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def penalty(self) -> float | None:
        """The repetition penalty, None for the default."""
        return self.repetition_penalty

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, given as one or as a list."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """Raise `ApiError` for values no Struct type and no `SamplingParams` refuses."""
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise invalid("n", f"n must be in [1, {MAX_CHOICES}], got {self.n}")
        for name in ("max_tokens", "max_completion_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise invalid(name, f"{name} must be >= 0, got {limit}")
        kept = self.truncate_prompt_tokens
        if kept is not None and kept < 1 and kept != -1:
            raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens must be -1 or >= 1, got {kept}")
        if self.bad_words is not None and len(self.bad_words) > MAX_BAD_WORDS:
            raise invalid("bad_words", f"bad_words may have {MAX_BAD_WORDS} words, got {len(self.bad_words)}")
        if any(len(word) > MAX_BAD_WORD_LENGTH for word in self.bad_words or ()):
            raise invalid("bad_words", f"a bad word may have {MAX_BAD_WORD_LENGTH} characters")
        if self.request_id is not None and not _REQUEST_ID.fullmatch(self.request_id):
            raise invalid("request_id", "request_id must be 1 to 128 letters, digits, '-', '_', '.' or ':'")

    def sampling_params(
        self, *, logprobs: int | None, prompt_logprobs: int | None, vocab_size: int, encode: Encode
    ) -> SamplingParams:
        """The parameters as the engine takes them, with a seed drawn if none was given.

        `encode` turns plain text into ids. Raises `ApiError` or `ParamError` naming the field.
        """
        given = {
            name: value
            for name in SamplingParams.__struct_fields__
            if name in GenerationFields.__struct_fields__ and (value := getattr(self, name)) is not None
        }
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        given |= {
            "bad_words": bad_word_ids(self.bad_words or (), encode),
            "logprobs": logprobs,
            "max_tokens": self.token_limit,
            "prompt_logprobs": prompt_logprobs,
            "seed": draw_seed() if self.seed is None else self.seed,
            "stop": self.stops,
        }
        if self.penalty is not None:
            given["repetition_penalty"] = self.penalty
        params = SamplingParams(**given)
        params.check_vocabulary(vocab_size)
        return params


def check_num_scored(num_tokens: int, params: SamplingParams, *, told: int = 1, field: str = "prompt_logprobs") -> None:
    """Raise `ApiError` naming `field` if an answer that tells `told` times of so many scored tokens is too large."""
    if params.prompt_logprobs is None:
        return
    a_token = params.prompt_logprobs + 1
    if told * num_tokens * a_token > MAX_PROMPT_ENTRIES:
        times = f"{told} times " if told > 1 else ""
        message = f"{field} {params.prompt_logprobs} of {num_tokens} prompt tokens {times}are "
        message += f"{told * num_tokens * a_token} log-probabilities, the limit is {MAX_PROMPT_ENTRIES}"
        raise invalid(field, message)


def bad_word_ids(words: Sequence[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """The id sequences that spell each word, at the start of a text and after a space.

    Raises `ApiError` for a word that has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(encode(word))
        if not bare:
            raise invalid("bad_words", f"bad_words must not contain {word!r}: it has no tokens")
        sequences[bare] = None
        sequences[tuple(encode(" " + word.lstrip(" ")))] = None
    return tuple(sequences)
