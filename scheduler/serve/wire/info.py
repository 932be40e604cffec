"""The small bodies: models, slots, health."""

import msgspec

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


class SlotState(msgspec.Struct, kw_only=True):
    """One slot, without a word of what it works on."""

    id: int
    is_processing: bool
    state: str
    request_id: str | None
    choice: int | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, view: SlotView) -> "SlotState":
        """`view` on the wire."""
        return cls(
            id=view.slot,
            is_processing=view.request_id is not None,
            state=view.state,
            request_id=view.request_id,
            choice=view.index,
            num_prompt_tokens=view.num_prompt,
            num_computed_tokens=view.num_computed,
            num_output_tokens=view.num_output,
        )


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
