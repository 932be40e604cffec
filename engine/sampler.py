"""From a row of logits to the next token.

The stages, in this order:

1. the logits are changed: `logit_bias`, `allowed_token_ids`, `bad_words`, `min_tokens`, then the repetition, frequency
   and presence penalties;
2. greedy stops here: the largest logit, the lowest id among equals;
3. `temperature`;
4. the distribution is narrowed, each filter seeing what the one before it left: `top_k`, `typical_p`, `top_p`, `min_p`;
5. one uniform number picks a token by inverse CDF, in order of ids.

Probabilities are float64, sums have one fixed order, equal logits rank by id: a row of logits, a request and a
position have one answer. (Stage order: vLLM's for 1 to 3, llama.cpp's for the filters.)
"""

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import Sampled, TokenLogprob, TokenLogprobs
from engine.errors import LogitsError, ParamError
from engine.kernels.compiled.sampling import draw, largest, pick, weights
from engine.params import SamplingParams
from engine.rng import RequestRng, request_rng

__all__ = [
    "Distribution",
    "distribution",
    "is_the_largest",
    "largest",
    "request_rng",
    "sample",
    "sampled_entropy",
    "token_logprobs",
]

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Logits = NDArray[np.float32] | NDArray[np.float64]

NUCLEUS_GUESS = 256
"""Tokens sorted at first for `top_p`; eight times as many whenever their mass falls short."""
LARGEST_SCORE = 1e300
"""Penalties change no score to more than this, or to less than its negative: the difference of two is finite."""


class Distribution(NamedTuple):
    """What is drawn from: token `ids` int64 [C], ascending, and their `probabilities` float64 [C], adding up to 1."""

    ids: Ids
    probabilities: Floats


def sample(
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int],
    rng: RequestRng,
    prompt: Sequence[int] = (),
    *,
    eos_ids: AbstractSet[int] = frozenset(),
) -> Sampled:
    """The token that follows `prompt` and `history` (what was generated), with log-probabilities if `params` ask.

    `logits` float32 [V] is left as it is. The draw is `rng`'s at position len(prompt) + len(history).

    Raises `LogitsError` if a logit is not finite, `ParamError` if every token is forbidden or a token id in `params` is
    not below V.
    """
    scores = _scores(logits, params, history, prompt, eos_ids)
    if params.is_greedy:
        token_id = int(scores.argmax())
    else:
        token_id = _drawn(scores, params, rng.uniform(len(prompt) + len(history)))
    if params.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, token_logprobs(logits, token_id, params.logprobs))


def is_the_largest(params: SamplingParams, num_generated: int) -> bool:
    """Whether `sample` after so many tokens is no more than `largest`, which serves all rows of a batch at once."""
    return params.is_greedy and params.logprobs is None and not params.changes_logits(num_generated)


def distribution(
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int] = (),
    prompt: Sequence[int] = (),
    *,
    eos_ids: AbstractSet[int] = frozenset(),
) -> Distribution:
    """The distribution `sample` draws from; raises as `sample` does."""
    scores = _scores(logits, params, history, prompt, eos_ids)
    if params.is_greedy:
        return Distribution(np.array([scores.argmax()], np.int64), np.ones(1))
    ids, _, weights = _candidates(scores, params)
    possible = weights > 0
    return Distribution(ids[possible], weights[possible] / weights.sum())


def sampled_entropy(
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int] = (),
    prompt: Sequence[int] = (),
    *,
    eos_ids: AbstractSet[int] = frozenset(),
) -> float:
    """The entropy, in nats, of the distribution `sample` draws from: 0 when greedy; raises as `sample` does."""
    _, probabilities = distribution(logits, params, history, prompt, eos_ids=eos_ids)
    return float(-(probabilities * np.log(probabilities)).sum())


def token_logprobs(logits: NDArray[np.float32], token_id: int, top_n: int) -> TokenLogprobs:
    """Log-probability and rank of `token_id`, and the `top_n` likeliest tokens, in the raw distribution.

    Raises `LogitsError` if a logit is not finite.
    """
    _require_finite(logits)
    largest = float(logits.max())
    log_total = largest + float(np.log(np.exp(logits - np.float64(largest)).sum()))
    chosen = logits[token_id]
    ahead = np.count_nonzero(logits > chosen) + np.count_nonzero(logits[:token_id] == chosen)
    top = _largest(logits, top_n) if top_n else ()
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(chosen) - log_total,
        rank=int(ahead) + 1,
        top=tuple(TokenLogprob(int(i), float(logits[i]) - log_total) for i in top),
    )


def _scores(
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int],
    prompt: Sequence[int],
    eos_ids: AbstractSet[int],
) -> Logits:
    """Stage 1: the logits themselves if nothing changes them, else a changed float64 copy."""
    _require_finite(logits)
    if not params.changes_logits(len(history)):
        return logits
    scores = logits.astype(np.float64)
    if params.logit_bias:
        scores[_known("logit_bias", params.logit_bias, len(scores))] += np.array([*params.logit_bias.values()])
    if params.allowed_token_ids is not None:
        allowed = np.zeros(len(scores), np.bool_)
        allowed[_known("allowed_token_ids", params.allowed_token_ids, len(scores))] = True
        scores[~allowed] = -np.inf
    scores[_forbidden(params, history, eos_ids, len(scores))] = -np.inf
    _penalize(scores, params, history, prompt)
    if scores.max() == -np.inf:
        raise ParamError("allowed_token_ids", "allowed_token_ids, bad_words and min_tokens together forbid every token")
    return scores


def _require_finite(logits: NDArray[np.float32]) -> None:
    if largest(logits[None])[0] < 0:
        raise LogitsError("the model's logits are not finite")


def _forbidden(params: SamplingParams, history: Sequence[int], eos_ids: AbstractSet[int], vocab_size: int) -> Ids:
    """Tokens that would complete a bad word, or end the choice before `min_tokens`."""
    completing = [
        word[-1]
        for word in params.bad_words
        if len(word) <= len(history) + 1 and tuple(history[len(history) + 1 - len(word) :]) == word[:-1]
    ]
    ending: list[int] = []
    if len(history) < params.min_tokens:
        ending += params.stop_token_ids
        if not params.ignore_eos:
            ending += sorted(eos_ids)
    return np.concatenate([_known("bad_words", completing, vocab_size), _known("stop_token_ids", ending, vocab_size)])


def _known(param: str, ids: Collection[int], vocab_size: int) -> Ids:
    """`ids` as an index; raises `ParamError` for one that is not a token."""
    index = np.array([*ids], np.int64)
    for token_id in index[(index < 0) | (index >= vocab_size)]:
        raise ParamError(param, f"{param} names token {token_id}, the vocabulary has {vocab_size}")
    return index


def _penalize(scores: Floats, params: SamplingParams, history: Sequence[int], prompt: Sequence[int]) -> None:
    """Change `scores` of tokens seen before: repetition (Keskar et al. 2019, CTRL), then frequency and presence."""
    if params.penalizes_repetition:
        window = [*prompt, *history]
        if params.repeat_last_n > 0:
            window = window[-params.repeat_last_n :]
        seen = np.unique(np.array(window, np.int64))
        seen = seen[scores[seen] > -np.inf]
        before = scores[seen]
        with np.errstate(over="ignore"):
            after = np.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
        scores[seen] = after.clip(-LARGEST_SCORE, LARGEST_SCORE)
    if params.frequency_penalty or params.presence_penalty:
        seen, counts = np.unique(np.array(history, np.int64), return_counts=True)
        scores[seen] -= params.frequency_penalty * counts + params.presence_penalty


class _Candidates(NamedTuple):
    """What is still in: `ids` ascending, their scores, and weights in proportion to their probabilities."""

    ids: Ids
    scores: Logits
    weights: Floats

    def only(self, keep: Ids) -> "_Candidates":
        return _Candidates(self.ids[keep], self.scores[keep], self.weights[keep])


def _drawn(scores: Logits, params: SamplingParams, uniform: float) -> int:
    """Stages 3 to 5. Where nothing narrows the distribution its weights need not be kept."""
    is_narrowed = 0 < params.top_k < len(scores) or params.typical_p < 1 or params.top_p < 1 or params.min_p > 0
    if not is_narrowed:
        return draw(scores, float(scores.max()), params.temperature, uniform)
    candidates = _candidates(scores, params)
    return int(candidates.ids[pick(candidates.weights, uniform)])


def _candidates(scores: Logits, params: SamplingParams) -> _Candidates:
    """Stages 3 and 4. `top_k` comes first: temperature does not change who is largest, and the rest is less work."""
    ids = np.arange(len(scores))
    if 0 < params.top_k < len(scores):
        ids = np.sort(_largest(scores, params.top_k))
        scores = scores[ids]
    left = _Candidates(ids, scores, weights(scores, float(scores.max()), params.temperature))
    if params.typical_p < 1:
        left = left.only(_typical(left.weights, params.typical_p))
    if params.top_p < 1:
        left = left.only(_nucleus(left, params.top_p))
    if params.min_p > 0:
        left = left.only(np.flatnonzero(left.weights >= params.min_p * left.weights.max()))
    return left


def _largest(scores: Logits, k: int) -> Ids:
    """Positions of the `k` largest, best first, equal ones by position."""
    width = max(1, len(scores) // (4 * k))
    n_blocks = len(scores) // width
    threshold = scores.dtype.type(-np.inf)
    if k < n_blocks:  # the k-th largest of the blocks' maxima has k scores at or above it
        maxima = scores[: n_blocks * width].reshape(n_blocks, width).max(axis=1)
        threshold = np.partition(maxima, n_blocks - k)[n_blocks - k]
    leading = np.flatnonzero(scores >= threshold)
    return leading[np.argsort(-scores[leading], kind="stable")[:k]]


def _typical(weights: Floats, mass: float) -> Ids:
    """The tokens whose surprise is nearest the entropy, as few as hold `mass`; equally near ones by id.

    Meister, Pimentel, Wiher and Cotterell, "Locally typical sampling", TACL 2023.
    """
    possible = np.flatnonzero(weights)
    probabilities = weights[possible] / weights[possible].sum()
    surprise = -np.log(probabilities)
    distance = np.abs(surprise - (probabilities * surprise).sum())
    nearest = np.argsort(distance, kind="stable")
    count = probabilities[nearest].cumsum().searchsorted(mass, side="left") + 1
    return np.sort(possible[nearest[:count]])


def _nucleus(candidates: _Candidates, mass: float) -> Ids:
    """The likeliest tokens, as few as hold `mass` (Holtzman et al., ICLR 2020)."""
    _, scores, weights = candidates
    target = mass * weights.sum()
    k = NUCLEUS_GUESS
    while True:
        leading = _largest(scores, k)
        count = int(weights[leading].cumsum().searchsorted(target, side="left")) + 1
        if count <= len(leading) or k >= len(scores):
            return np.sort(leading[:count])
        k *= 8
