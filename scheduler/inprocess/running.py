"""What both engines are made of: a model that runs, and what is asked of it as a `Request`."""

import asyncio
import contextlib
import operator
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import DrainingError, ParamError
from engine.kernels.protocol import Cache
from engine.model import Model
from engine.params import SamplingParams, check_token_ids
from scheduler.defaults import KV_DTYPE, MAX_CONTEXT, PREFILL_CHUNK, SLOTS
from scheduler.loop import EngineLoop
from scheduler.prepare import prepare
from scheduler.request import Request
from scheduler.seed import draw_seed

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

DEFAULT_PARAMS = SamplingParams()
NOT_RUNNING = "the engine is not running: use it inside its `with` block"


@dataclass(frozen=True, slots=True)
class Running:
    """A model, and the loop that ticks it."""

    model: Model
    cache: Cache
    loop: EngineLoop
    fingerprint: str

    def request(self, prompt: Prompt | None, messages: Messages | None, params: SamplingParams, n: int) -> Request:
        """What is asked, checked and tokenized. Any thread may call this.

        Raises `ParamError` naming what is wrong, and `TemplateError` for messages the model's template refuses.
        """
        vocab_size = self.model.tokenizer.vocab_size
        prompt_ids = self._prompt_ids(prompt, messages)
        check_token_ids("prompt", prompt_ids, vocab_size)
        params.check_vocabulary(vocab_size)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=draw_seed())
        return Request(id=uuid.uuid4().hex, prompt_ids=prompt_ids, params=params, n=n)

    def _prompt_ids(self, prompt: Prompt | None, messages: Messages | None) -> tuple[int, ...]:
        if (prompt is None) == (messages is None):
            raise ParamError("prompt", "either prompt or messages is required, and not both")
        if messages is not None:
            template = self.model.chat_template
            if template is None:
                raise ParamError("messages", "this model has no chat template: pass a prompt")
            return tuple(template.render(messages, now=_local_time).encode(self.model.tokenizer))
        assert prompt is not None
        if isinstance(prompt, str):
            return tuple(self.model.tokenizer.encode(prompt))
        return tuple(operator.index(token_id) for token_id in prompt)


class InProcess:
    """The engine as its user sees it before and while it runs; `Engine` and `BlockingEngine` say how it is used.

    `model` is a loaded model or the path of a GGUF file. `slots` choices run at once, each of at most `context` tokens,
    prompt and answer together; the default is the model's own context, but not above 4096. `kv_dtype` is the type of
    the cached keys and values, float16 or float32; `kernels` the set to load a path with: auto, reference or compiled.
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        slots: int = SLOTS,
        context: int | None = None,
        kv_dtype: str = KV_DTYPE,
        kernels: str = "auto",
    ) -> None:
        self._source = model
        self._slots = slots
        self._context = context
        self._kv_dtype = kv_dtype
        self._kernels = kernels
        self._running: Running | None = None

    @property
    def model(self) -> Model:
        """The model: its tokenizer, its chat template, its configuration."""
        return self._now_running.model

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together, at most."""
        return self._now_running.cache.max_len

    @property
    def fingerprint(self) -> str:
        """Where it is equal, equal requests with equal seeds have equal answers, a server's included."""
        return self._now_running.fingerprint

    @property
    def num_running(self) -> int:
        """Choices that are being computed."""
        return self._now_running.loop.num_running

    @property
    def num_waiting(self) -> int:
        """Choices that wait for a slot."""
        return self._now_running.loop.num_waiting

    @property
    def _now_running(self) -> Running:
        """Raises `DrainingError` outside the engine's `with` block."""
        if self._running is None:
            raise DrainingError(NOT_RUNNING)
        return self._running

    @contextlib.asynccontextmanager
    async def _run(self) -> AsyncIterator[Running]:
        """Load the model in a thread and tick it. Leaving ends every request, then raises what the loop has failed of.

        Raises `ModelFileError`, `ParamError` for a context or kernels that cannot be, and `CacheError` for slots or a
        kv_dtype that cannot.
        """
        running = await asyncio.to_thread(self._load)
        ticking = asyncio.create_task(running.loop.run())
        try:
            yield running
        finally:
            await running.loop.stop()
            await ticking

    def _load(self) -> Running:
        if isinstance(self._source, Model):
            model = self._source
            if self._kernels not in {"auto", model.kernels}:
                raise ParamError("kernels", f"kernels must be those of the loaded model, got {self._kernels!r}")
        else:
            model = Model.load(self._source, kernels=self._kernels)
        longest = model.config.max_context
        context = min(longest, MAX_CONTEXT) if self._context is None else self._context
        if not 2 <= context <= longest:
            raise ParamError("context", f"context must be in [2, {longest}], got {context}")
        cache = model.new_cache(self._slots, context, self._kv_dtype)
        # The queue is the caller's own: no limit protects it from others.
        scheduler, backend = prepare(model, cache, prefill_chunk=PREFILL_CHUNK, max_queue=sys.maxsize)
        loop = EngineLoop(scheduler, backend, model.tokenizer)
        return Running(model, cache, loop, model.fingerprint(self._kv_dtype))


def _local_time() -> datetime:
    """The clock a template may ask."""
    return datetime.now().astimezone()
