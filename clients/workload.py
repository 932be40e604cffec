"""What a benchmark asks for: random prompts of token ids, the same for the same seed on any machine."""

import random

import msgspec


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`num_prompts` prompts of `input_len` ids in [`low_id`, `high_id`], each continued by `output_len` tokens."""

    num_prompts: int
    input_len: int
    output_len: int
    low_id: int
    high_id: int
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """The prompts, independent of one another, so that no server can reuse a common beginning."""
        rng = random.Random(self.seed)  # noqa: S311 - a benchmark's prompts are no secret
        return [
            [rng.randint(self.low_id, self.high_id) for _ in range(self.input_len)] for _ in range(self.num_prompts)
        ]
