"""Where an unfinished request is, for people: in counts only, no text, no token ids."""

from typing import Literal

import msgspec

from scheduler.sequence import Sequence


class RequestView(msgspec.Struct, frozen=True):
    """One unfinished request.

    `state` is that of the choice that is furthest. `position` is the request's place in the queue, 1 for the next to
    start, None once it has started. It `waits_for` a slot, or for the prefill of an earlier prompt, or nothing (None).
    `num_computed` counts prompt tokens, `num_output` the tokens of all choices, `num_finished` the choices that ended.
    """

    request_id: str
    state: Literal["queued", "prefilling", "decoding"]
    position: int | None
    waits_for: Literal["slot", "prefill"] | None
    num_choices: int
    num_finished: int
    num_prompt: int
    num_computed: int
    num_output: int


def request_view(choices: tuple[Sequence, ...], *, position: int | None, prefilling: list[Sequence]) -> RequestView:
    """The view of a request from its choices, its place in the queue, and whose prefill goes on next of all running."""
    furthest = max(choices, key=lambda choice: choice.num_computed)
    state: Literal["queued", "prefilling", "decoding"] = "decoding"
    waits_for: Literal["slot", "prefill"] | None = None
    if position is not None:
        state, waits_for = "queued", "slot"
    elif furthest.num_computed < furthest.num_prompt:
        waits = furthest not in prefilling and furthest.num_computed < furthest.prefill_end
        state, waits_for = "prefilling", "prefill" if waits else None
    return RequestView(
        request_id=furthest.request.id,
        state=state,
        position=position,
        waits_for=waits_for,
        num_choices=len(choices),
        num_finished=sum(choice.is_finished for choice in choices),
        num_prompt=furthest.num_prompt,
        num_computed=min(furthest.num_computed, furthest.num_prompt),
        num_output=sum(len(choice.output_ids) for choice in choices),
    )
