"""What one tick asks of a model, and what comes back: plain data, no arrays.

A batch is ragged. A prefill chunk is many tokens of one slot, a decode is one token each of many slots, a mixed tick
is both; the kernels see rows and know no phases.
"""

import msgspec


class Chunk(msgspec.Struct, frozen=True):
    """Tokens to append to one slot at `start`, `start + 1`, ...

    Logits are wanted for the last `n_logits` of them: 0 for a prefill chunk that is not the last, 1 to sample from.
    Whatever the slot held at `start` and beyond is forgotten first, so a new request begins by writing at 0.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    n_logits: int = 1


class Copy(msgspec.Struct, frozen=True):
    """The first `length` positions of `source`, copied to `target` before any chunk runs (`n` choices, one prefill)."""

    source: int
    target: int
    length: int


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token and its log-probability in the raw distribution (before temperature, penalties and filters)."""

    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True):
    """The chosen token's log-probability, its rank (1 = likeliest), and the likeliest tokens, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TokenLogprob, ...] = ()


class Sampled(msgspec.Struct, frozen=True):
    """The token chosen after one chunk; `logprobs` only if the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Scored(msgspec.Struct, frozen=True):
    """The log-probabilities of the prompt tokens that follow each row of a prefill chunk, in order."""

    logprobs: tuple[TokenLogprobs, ...]


class RowError(msgspec.Struct, frozen=True):
    """One request's failure in a tick; the others in the batch are untouched.

    `message` is for the client and names no internals; `cause` is for the log.
    """

    message: str
    cause: Exception | None = None


Result = Sampled | Scored | RowError | None
"""What one chunk came to; None for a prefill chunk that neither samples nor scores."""
