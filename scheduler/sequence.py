"""The progress of one choice of one admitted request. Only the scheduler's core writes to it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.batch import TokenLogprobs
from scheduler.output import Output
from scheduler.request import FinishReason, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """Choice `index` of `request`, at most `limit` tokens long; it holds a slot from admission to the end.

    It is the `number`-th that got one. `num_computed` counts the positions whose K/V are in the slot. Its `output` is
    opened when it gets its slot: of the many choices that may wait, each is small.
    """

    request: Request
    index: int
    limit: int
    t_arrival: float
    open_output: Callable[[Request, int], Output]
    output: Output | None = None
    slot: int | None = None
    number: int | None = None
    num_computed: int = 0
    output_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    t_admitted: float | None = None
    t_first_token: float | None = None
    t_last_token: float | None = None

    @property
    def num_prompt(self) -> int:
        """Tokens in the prompt."""
        return len(self.request.prompt_ids)

    @property
    def prefill_end(self) -> int:
        """Where prefill ends and decoding begins.

        The last prompt token runs with the decoding rows when the rows before it are shared by several choices, or
        are there to be scored; else it ends the last prefill chunk, which saves a tick.
        """
        stands_alone = self.request.n > 1 or self.request.params.prompt_logprobs is not None
        return self.num_prompt - 1 if stands_alone else self.num_prompt

    @property
    def is_scored(self) -> bool:
        """Whether its prefill rows want logits: the prompt is scored once, by the choice that comes first."""
        return self.index == 0 and self.request.params.prompt_logprobs is not None

    @property
    def next_token_id(self) -> int:
        """The token whose K/V come next."""
        if self.num_computed < self.num_prompt:
            return self.request.prompt_ids[self.num_computed]
        return self.output_ids[self.num_computed - self.num_prompt]

    @property
    def is_finished(self) -> bool:
        """Whether the choice is over; it holds no slot then."""
        return self.finish_reason is not None
