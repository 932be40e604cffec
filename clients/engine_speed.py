"""How fast a model's forwards are: what is to be measured, and the measuring. The clock is handed in."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from engine.batch import Chunk
from engine.config import ModelConfig
from engine.cost import multiply_adds
from engine.model import Model

Phase = Literal["prefill", "decode"]

SAMPLED_FORWARDS = 4
"""Of a long prefill's forwards this many are run, evenly spaced; they stand for the others."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every batch is measured with every context, `repeats` times, in turns.

    At most `chunk` rows go through the model at once in a prefill; a decode takes `num_steps` forwards.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk: int
    num_steps: int
    repeats: int
    kv_dtype: str
    seed: int


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One phase with `batch` sequences at `context`, measured once per repeat.

    In `seconds` each, `num_tokens` go through the model in `num_forwards`, which takes `multiply_adds` in products of
    weights.
    """

    phase: Phase
    context: int
    batch: int
    num_tokens: int
    num_forwards: int
    multiply_adds: int
    seconds: tuple[float, ...] = ()

    @property
    def median_s(self) -> float:
        """The seconds of a middling repeat."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """In a middling repeat."""
        return self.num_tokens / self.median_s

    @property
    def multiply_adds_per_s(self) -> float:
        """In a middling repeat."""
        return self.multiply_adds / self.median_s


def plan(config: ModelConfig, settings: Settings) -> list[Figure]:
    """All figures, without seconds yet."""
    figures = []
    for context in settings.contexts:
        for batch in settings.batches:
            figures.append(
                Figure(
                    phase="prefill",
                    context=context,
                    batch=batch,
                    num_tokens=batch * context,
                    num_forwards=len(prefill_starts(context, batch, settings.chunk)),
                    multiply_adds=multiply_adds(config, batch * context, batch),
                )
            )
            num_tokens = batch * settings.num_steps
            figures.append(
                Figure(
                    phase="decode",
                    context=context,
                    batch=batch,
                    num_tokens=num_tokens,
                    num_forwards=settings.num_steps,
                    multiply_adds=multiply_adds(config, num_tokens, num_tokens),
                )
            )
    return sorted(figures, key=lambda figure: figure.phase, reverse=True)


class EngineSpeed:
    """A model, and a cache whose slots are filled with a random prompt as far as a figure needs it."""

    def __init__(self, model: Model, figures: Sequence[Figure], settings: Settings, clock: Callable[[], float]) -> None:
        self._model = model
        self._chunk = settings.chunk
        self._num_steps = settings.num_steps
        self._clock = clock
        self._rng = np.random.default_rng(settings.seed)
        self._prompt = self._random_ids(max(figure.context for figure in figures))
        self._source = max(figure.batch for figure in figures)
        n_slots, max_len = self._source + 1, len(self._prompt) + settings.num_steps
        self.cache = model.new_cache(n_slots, max_len, settings.kv_dtype)
        for start in range(0, len(self._prompt), self._chunk):
            model.forward((Chunk(self._source, start, self._prompt[start : start + self._chunk], 0),), self.cache)

    def seconds(self, figure: Figure) -> float:
        """Measure `figure` once."""
        self._fill(figure.context, figure.batch)
        if figure.phase == "decode":
            return sum(self._decode(figure.context, figure.batch))
        return self._prefill(figure.context, figure.batch)

    def _decode(self, context: int, batch: int) -> Iterator[float]:
        """The seconds of each step."""
        for position in range(context, context + self._num_steps):
            ids = self._random_ids(batch)
            yield self._timed([Chunk(slot, position, (token_id,)) for slot, token_id in enumerate(ids)])

    def _prefill(self, context: int, batch: int) -> float:
        """The seconds of all forwards of a prefill: the last one's, and those sampled of the others for all of them."""
        *starts, last = prefill_starts(context, batch, self._chunk)
        # From the last one to the first: what lies before a chunk is in the cache, and forgotten only afterwards.
        last_s = self._timed(self._prefill_chunks(last, context, context, batch))
        if not starts:
            return last_s
        length = starts[1] - starts[0] if len(starts) > 1 else last - starts[0]
        sampled = [
            self._timed(self._prefill_chunks(start, start + length, context, batch))
            for start in reversed(evenly_spaced(starts, SAMPLED_FORWARDS - 1))
        ]
        return last_s + len(starts) * statistics.mean(sampled)

    def _prefill_chunks(self, start: int, end: int, context: int, batch: int) -> list[Chunk]:
        return [Chunk(slot, start, self._prompt[start:end], int(end == context)) for slot in range(batch)]

    def _timed(self, chunks: Sequence[Chunk]) -> float:
        t_start = self._clock()
        self._model.forward(chunks, self.cache)
        return self._clock() - t_start

    def _fill(self, context: int, batch: int) -> None:
        """Make the first `batch` slots hold the first `context` positions of the prompt."""
        for slot in range(batch):
            if self.cache.seq_len(slot=slot) < context:
                self.cache.copy(self._source, slot, context)

    def _random_ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, self._model.config.vocab_size, count).tolist())


def prefill_starts(context: int, batch: int, chunk: int) -> list[int]:
    """Where the forwards of a prefill begin: `batch` prompts side by side, `chunk` rows at once, at least one each."""
    return list(range(0, context, min(max(chunk // batch, 1), context)))


def evenly_spaced(values: Sequence[int], count: int) -> list[int]:
    """`count` of `values` (or all, if there are fewer), the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
