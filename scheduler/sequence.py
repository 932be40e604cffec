"""The progress of one choice of one admitted request. Only the scheduler's core writes to it."""

from dataclasses import dataclass, field

from engine.batch import TokenLogprobs
from scheduler.request import FinishReason, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """`num_computed` counts the positions whose K/V are in the slot; a slot is held from admission to the end."""

    request: Request
    index: int
    t_arrival: float
    slot: int | None = None
    num_computed: int = 0
    output_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    t_admitted: float | None = None
    t_first_token: float | None = None
    t_finished: float | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def is_waiting(self) -> bool:
        return self.slot is None and self.finish_reason is None

    @property
    def is_prefilling(self) -> bool:
        return self.slot is not None and self.num_computed < self.num_prompt

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
