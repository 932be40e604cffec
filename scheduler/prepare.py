"""From a model to a scheduler and a backend that are ready to tick."""

import sys

from engine.batch import Chunk
from engine.kernels.protocol import Cache
from engine.model import Model
from engine.sampler import largest
from scheduler.backend import ModelBackend
from scheduler.core import Scheduler


def prepare(
    model: Model, cache: Cache, *, prefill_chunk: int, max_queue: int, max_queue_tokens: int = sys.maxsize
) -> tuple[Scheduler, ModelBackend]:
    """A scheduler for the slots of `cache`, and its backend, which has run a first forward and will be fast.

    Takes seconds where kernels must be compiled, the sampler's included. The cache is empty afterwards.
    """
    largest(model.forward((Chunk(slot=0, start=0, token_ids=(0,)),), cache))
    cache.truncate(0)
    scheduler = Scheduler(
        n_slots=cache.n_slots,
        max_len=cache.max_len,
        prefill_chunk=prefill_chunk,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        eos_ids=model.tokenizer.eos_ids,
    )
    return scheduler, ModelBackend(model, cache)
