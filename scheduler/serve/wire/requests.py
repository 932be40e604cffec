"""GET and DELETE /v1/requests/{id}: how an unfinished call fares, and its end."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from scheduler.request_view import RequestView


class RequestState(msgspec.Struct, kw_only=True):
    """Where an unfinished call is, all its prompts and choices together.

    `state` is that of what is furthest. While it is queued, `position` is its place in the queue, 1 for the next to
    start; it `waits_for` a slot, or, once it has one, for the prefill of an earlier prompt, or for nothing (null).
    """

    id: str
    object: str = "request"
    state: Literal["queued", "prefilling", "decoding"]
    position: int | None
    waits_for: Literal["slot", "prefill"] | None
    prompt_tokens: int
    computed_prompt_tokens: int
    completion_tokens: int
    choices: int
    finished_choices: int

    @classmethod
    def of(cls, call_id: str, views: Sequence[RequestView]) -> "RequestState":
        """The state of the call whose unfinished requests have `views`, of which there is one at least."""
        furthest = max(views, key=lambda view: (("queued", "prefilling", "decoding").index(view.state), -_place(view)))
        return cls(
            id=call_id,
            state=furthest.state,
            position=furthest.position,
            waits_for=furthest.waits_for,
            prompt_tokens=sum(view.num_prompt for view in views),
            computed_prompt_tokens=sum(view.num_computed for view in views),
            completion_tokens=sum(view.num_output for view in views),
            choices=sum(view.num_choices for view in views),
            finished_choices=sum(view.num_finished for view in views),
        )


def _place(view: RequestView) -> int:
    return view.position or 0


class RequestDeleted(msgspec.Struct, kw_only=True):
    """Whether the call was unfinished, and has been ended by this."""

    id: str
    object: str = "request.deleted"
    aborted: bool
