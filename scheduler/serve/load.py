"""From a model file to everything a server has that needs no event loop, told of in the log."""

import contextlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import structlog

from engine.chat import TEMPLATE_KEY
from engine.config import ModelConfig
from engine.errors import LockstepError, ModelFileError, TemplateError
from engine.gguf import GGUFFile
from engine.model import Model, ModelText, Progress
from scheduler.batch import Backend
from scheduler.core import Scheduler
from scheduler.defaults import MAX_CONTEXT
from scheduler.prepare import prepare
from scheduler.serve.rendering.isolated import IsolatedTemplate
from scheduler.serve.service import ChatTemplate, Tokenizer
from scheduler.serve.settings import ServeSettings

PROGRESS_STEP = 0.25

_log: structlog.stdlib.BoundLogger = structlog.get_logger("lockstep.load")


class CacheRoomError(LockstepError):
    """A cache of `slots` slots of `max_len` positions, for which the system has no room."""

    def __init__(self, slots: int, max_len: int, n_bytes: int) -> None:
        super().__init__(
            f"{slots} slots of {max_len} positions are {n_bytes / 2**30:.1f} GiB of cache, more than this system "
            "reserves: lower --slots or --context"
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run. `max_len` is the positions a slot holds; `close` ends what else was started for it."""

    scheduler: Scheduler
    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_len: int
    fingerprint: str
    close: Callable[[], None] = lambda: None


def load(settings: ServeSettings) -> Loaded:
    """The model of `settings`, loaded and warmed up. Takes seconds.

    Raises `ModelFileError`, and `CacheRoomError` before the weights are read.
    """
    _log.info("loading", model=str(settings.model))
    if settings.threads is not None and settings.threads > (os.cpu_count() or 1):
        _log.warning("more threads than this machine has are slow", threads=settings.threads, cpus=os.cpu_count())
    with contextlib.ExitStack() as started:
        with GGUFFile.open(settings.model) as file, ThreadPoolExecutor(1) as hashing:
            config = ModelConfig.from_gguf(file)
            max_len = context_of(settings, config.max_context)
            _check_room(settings, config, max_len)
            digest = hashing.submit(file.digest)  # while the rest is made of it
            text = ModelText.of(file)
            template = None
            if text.chat_template is not None:  # its process starts meanwhile, too
                template = started.enter_context(contextlib.closing(IsolatedTemplate(text.chat_template)))
            model = Model.of(
                file,
                config,
                text,
                kernels=settings.kernels,
                threads=settings.threads,
                weights=settings.weights,
                progress=_progress(),
                digest=digest.result,
            )
        if model.rounds_floats:
            _log.info("float weights rounded to 8 bits; --weights f32 keeps them")
        cache = model.new_cache(settings.slots, max_len, settings.kv_dtype)
        _log.info(
            "loaded",
            model=settings.model_name,
            kernels=model.kernels,
            slots=settings.slots,
            context=max_len,
            kv_dtype=settings.kv_dtype,
            kv_cache_mib_at_most=round(cache.nbytes() / 2**20, 1),
        )
        scheduler, backend = prepare(
            model,
            cache,
            prefill_chunk=settings.prefill_chunk,
            max_queue=settings.max_queue,
            max_queue_tokens=settings.max_queue_tokens,
        )
        if template is not None:
            _check(template, model)
        return Loaded(
            scheduler=scheduler,
            backend=backend,
            tokenizer=model.tokenizer,
            template=template,
            max_len=max_len,
            fingerprint=model.fingerprint(settings.kv_dtype),
            close=started.pop_all().close,
        )


def _check_room(settings: ServeSettings, config: ModelConfig, max_len: int) -> None:
    """Refuse what the system does not reserve. More than it has is no fault: it gives memory only when that is used."""
    width = 2 * config.n_layers * config.n_kv_heads * config.d_head * np.dtype(settings.kv_dtype).itemsize
    n_bytes = settings.slots * max_len * width
    try:
        mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError) as error:
        raise CacheRoomError(settings.slots, max_len, n_bytes) from error


def _check(template: IsolatedTemplate, model: Model) -> None:
    try:
        template.check()
    except TemplateError as error:
        raise ModelFileError(model.path, f"does not compile: {error}", TEMPLATE_KEY) from error


def context_of(settings: ServeSettings, model_context: int) -> int:
    """Positions per slot: what was asked for, but not more than the model was trained on."""
    if settings.context is None:
        return min(model_context, MAX_CONTEXT)
    if settings.context > model_context:
        _log.warning("context lowered to the model's own", asked=settings.context, context=model_context)
    return min(settings.context, model_context)


def _progress() -> Progress:
    """A callable that logs each stage as it begins and whenever another part of it is done."""
    shown: dict[str, float] = {}

    def report(stage: str, fraction: float) -> None:
        if stage not in shown or fraction >= shown[stage] + PROGRESS_STEP or shown[stage] < fraction == 1:
            shown[stage] = fraction
            _log.info(f"{stage} {round(100 * fraction)} %")

    return report
