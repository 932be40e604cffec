"""What the next tick does: a pure function of a few counts."""

from collections.abc import Iterable

import msgspec

PROMPT_LOGPROBS_CHUNK = 64
"""Rows of a tick that want logits to score a prompt: 64 rows of a 49,152-token vocabulary are 12 MB."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt with `num_left` > 0 tokens to compute; every row of it wants logits if it `is_scored`."""

    num_left: int
    is_scored: bool = False


class Prefill(msgspec.Struct, frozen=True):
    """Run the next `num_tokens[i]` of the i-th prompt, of the first of them at least one."""

    num_tokens: tuple[int, ...]


class Decode(msgspec.Struct, frozen=True):
    """Run one row of every sequence that is ready for it."""


class View(msgspec.Struct, frozen=True):
    """What the decision depends on.

    `num_decoding` sequences are ready for a decode row; `prompts` are unfinished, oldest first; a tick may take
    `prefill_chunk` of their tokens.
    """

    num_decoding: int
    prompts: tuple[Prompt, ...]
    prefill_chunk: int
    after_prefill: bool
    """Whether the tick before was a prefill."""


def next_tick(view: View) -> Prefill | Decode | None:
    """The next tick's work, None if there is none.

    Prefill and decode ticks take turns while both have work, so long prompts neither stop the running streams nor wait
    for them. A prefill tick gives its tokens to the oldest prompts in order: a long one takes them all, and short ones
    share a tick.
    """
    if view.prompts and not (view.num_decoding and view.after_prefill):
        return Prefill(shares(view.prompts, view.prefill_chunk))
    if view.num_decoding:
        return Decode()
    return None


def shares(prompts: Iterable[Prompt], prefill_chunk: int) -> tuple[int, ...]:
    """How many tokens of each of the first prompts a prefill tick computes."""
    left, left_to_score = prefill_chunk, PROMPT_LOGPROBS_CHUNK
    taken = []
    for prompt in prompts:
        limit = min(left, left_to_score) if prompt.is_scored else left
        num_tokens = min(prompt.num_left, limit)
        if num_tokens == 0:
            break
        taken.append(num_tokens)
        left -= num_tokens
        if prompt.is_scored:
            left_to_score -= num_tokens
    return tuple(taken)
