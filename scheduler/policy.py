"""What the next tick does: a pure function of a few counts."""

import msgspec

PROMPT_LOGPROBS_CHUNK = 64
"""Tokens in a chunk whose every row wants logits: 64 rows of a 49,152-token vocabulary are 12 MB."""


class Prefill(msgspec.Struct, frozen=True):
    """Run the next `num_tokens` of the oldest unfinished prompt."""

    num_tokens: int


class Decode(msgspec.Struct, frozen=True):
    """Run one row of every sequence that is ready for it."""


class View(msgspec.Struct, frozen=True):
    """What the decision depends on.

    `num_decoding` sequences are ready for a decode row; the oldest unfinished prompt has `num_to_prefill` tokens left
    (0: there is none), of which one tick may take `max_chunk`.
    """

    num_decoding: int
    num_to_prefill: int
    max_chunk: int
    after_prefill: bool
    """Whether the tick before was a prefill."""


def next_tick(view: View) -> Prefill | Decode | None:
    """The next tick's work, None if there is none.

    Prefill chunks and decode ticks take turns while both have work, so a long prompt neither stops the running
    streams nor waits for them.
    """
    if view.num_to_prefill and not (view.num_decoding and view.after_prefill):
        return Prefill(min(view.num_to_prefill, view.max_chunk))
    if view.num_decoding:
        return Decode()
    return None
