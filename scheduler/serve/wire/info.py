"""The small bodies: models, slots, health."""

import msgspec

from scheduler.serve.wire.llama import LlamaSampling
from scheduler.slots import SlotView


class ModelCard(msgspec.Struct, kw_only=True):
    """One name the server answers to."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "lockstep"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Every name the server answers to."""

    object: str = "list"
    data: list[ModelCard]


class NextToken(msgspec.Struct, kw_only=True):
    """How far the answer in a slot is, as llama-server tells it."""

    has_next_token: bool
    n_remain: int
    n_decoded: int


class SlotState(msgspec.Struct, kw_only=True):
    """One slot, without a word of what it works on: in our names, and behind them in llama-server's.

    An idle slot has no `params` and no `next_token`, which is a list of one, and its `id_task` is -1.
    """

    id: int
    is_processing: bool
    state: str
    request_id: str | None
    choice: int | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int

    id_task: int
    n_ctx: int
    speculative: bool = False
    n_prompt_tokens: int
    n_prompt_tokens_processed: int
    n_prompt_tokens_cache: int = 0
    params: LlamaSampling | msgspec.UnsetType = msgspec.UNSET
    next_token: list[NextToken] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, view: SlotView, n_ctx: int) -> "SlotState":
        """`view` of a slot of `n_ctx` positions on the wire."""
        state = cls(
            id=view.slot,
            is_processing=view.request_id is not None,
            state=view.state,
            request_id=view.request_id,
            choice=view.index,
            num_prompt_tokens=view.num_prompt,
            num_computed_tokens=view.num_computed,
            num_output_tokens=view.num_output,
            id_task=-1 if view.number is None else view.number,
            n_ctx=n_ctx,
            n_prompt_tokens=view.num_prompt,
            n_prompt_tokens_processed=min(view.num_computed, view.num_prompt),
        )
        if view.params is not None:
            state.params = LlamaSampling.of(view.params)
            n_remain = view.limit - view.num_output
            state.next_token = [NextToken(has_next_token=n_remain > 0, n_remain=n_remain, n_decoded=view.num_output)]
        return state


class Status(msgspec.Struct, kw_only=True):
    """Whether the server can serve."""

    status: str


class Version(msgspec.Struct, kw_only=True):
    """Of the server."""

    version: str


class Load(msgspec.Struct, kw_only=True):
    """How many requests have been taken in and are not finished."""

    server_load: int


class WorkerLoad(msgspec.Struct, kw_only=True):
    """The same number, by the name vllm-router reads."""

    load: int
