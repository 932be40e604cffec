"""What rounding costs: a kernel set's distribution of the next token against the float32 model's, over a text.

    python -m tests.quality MODEL.gguf TEXT [CHUNKS]

As `llama-perplexity --kl-divergence` does it: chunks of 512 tokens, each from an empty cache, the second half scored.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.batch import Chunk
from engine.model import Model

CHUNK = 512


@dataclass(frozen=True, slots=True)
class Quality:
    """Over `count` positions: the mean KL divergence in nats with its standard error, the share of equal top tokens,
    and the float32 model's own perplexity."""

    count: int
    divergence: float
    error: float
    same_top: float
    perplexity: float


def compare(exact: Model, rounded: Model, token_ids: Sequence[int], chunks: int) -> Quality:
    divergences, same, losses = [], [], []
    for ids in _chunks(token_ids, chunks):
        p, q = (_log_probabilities(model, ids) for model in (exact, rounded))
        divergences.append((np.exp(p) * (p - q)).sum(axis=1))
        same.append(p.argmax(axis=1) == q.argmax(axis=1))
        losses.append(-p[np.arange(len(p)), ids[CHUNK // 2 + 1 :]])
    divergence = np.concatenate(divergences)
    return Quality(
        count=len(divergence),
        divergence=float(divergence.mean()),
        error=float(divergence.std() / np.sqrt(len(divergence))),
        same_top=float(np.concatenate(same).mean()),
        perplexity=float(np.exp(np.concatenate(losses).mean())),
    )


def _chunks(token_ids: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, count * CHUNK, CHUNK):
        ids = tuple(token_ids[start : start + CHUNK])
        assert len(ids) == CHUNK, f"the text has {len(token_ids)} tokens, {count} chunks need {count * CHUNK}"
        yield ids


def _log_probabilities(model: Model, ids: tuple[int, ...]) -> np.ndarray:
    """Of the token after each of the chunk's second half but the last: float64 [255, V]."""
    logits = model.forward([Chunk(0, 0, ids, CHUNK // 2)], model.new_cache(1, CHUNK))[:-1].astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def main(model: str, text: str, chunks: str = "8") -> None:
    exact, rounded = Model.load(model, kernels="reference"), Model.load(model, kernels="compiled")
    token_ids = exact.tokenizer.encode(Path(text).read_text(encoding="utf-8"), parse_special=False)
    quality = compare(exact, rounded, token_ids, int(chunks))
    print(  # noqa: T201 - the program's output
        f"{quality.count} positions: mean KL divergence {quality.divergence:.5f} +- {quality.error:.5f}, "
        f"same top token {quality.same_top:.2%}, float32 perplexity {quality.perplexity:.2f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
