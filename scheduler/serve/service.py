"""The service behind every protocol: it turns what clients ask into `Request`s and hands them to the engine loop.

Whatever takes time that grows with its input (decoding bodies, templates, tokenizing) runs in the pool behind
`off_loop`; the other methods that say so are called from there, the rest from the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec

from engine.errors import ContextLengthError
from engine.params import check_token_ids
from scheduler.loop import EngineLoop
from scheduler.request import Request
from scheduler.serve.prometheus import Exposition
from scheduler.serve.tracing import Tracing
from scheduler.serve.wire.chat import ChatFields, normalised
from scheduler.serve.wire.errors import ApiError, invalid
from scheduler.serve.wire.info import ModelCard
from scheduler.serve.wire.logprobs import token_text
from scheduler.serve.wire.sampling import GenerationFields
from scheduler.stream import EventStream

P = ParamSpec("P")
T = TypeVar("T")

TokenIds = tuple[int, ...]

MAX_CONTEXTS = 16
"""How many contexts' worth of text is tokenized, or of tokens made text, where the whole need not fit into one."""


class Tokenizer(Protocol):
    """What the service needs of a tokenizer; `encode` may be called from several threads."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, if there is one."""

    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]:
        """The ids of `text`."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes a token stands for."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`."""


class RenderedChat(Protocol):
    """A conversation as the model is to see it."""

    @property
    def text(self) -> str:
        """What it says, control tokens included."""

    def encode(self, tokenizer: Tokenizer, /) -> list[int]:
        """Its ids; text from messages never becomes a control token."""


class ChatTemplate(Protocol):
    """What the service needs of a chat template."""

    @property
    def source(self) -> str:
        """The template as it is written."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: Callable[[], datetime] | None = None,
        **template_kwargs: Any,
    ) -> RenderedChat:
        """The conversation rendered. Raises `TemplateError`."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What clients are told of the model. `names` are those it answers to, the reported one first."""

    names: tuple[str, ...]
    accepts_any_name: bool
    max_len: int
    fingerprint: str
    created: int


class Service:
    """One model, one engine loop, and the threads in which prompts are prepared."""

    def __init__(
        self,
        engine: EngineLoop,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model: ServedModel,
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.calls: dict[str, tuple[str, ...]] = {}
        """The ids of the requests of every unfinished call, by each name of the call."""
        self.exposition = Exposition(engine, model.names[0])
        self.tracing = tracing
        self._template = template
        self._longest_token = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="background")

    async def off_loop(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises, computed in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))

    async def in_background(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same in a thread of its own, for work that may be long and that no call for text waits for."""
        return await asyncio.get_running_loop().run_in_executor(self._background, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Let the threads end."""
        for pool in (self._pool, self._background):
            pool.shutdown(wait=False, cancel_futures=True)

    def submit(self, request: Request) -> EventStream:
        """The stream of the request's events. Raises `QueueFullError`, `DrainingError`, `ParamError` (id in use)."""
        return self.engine.submit(request)

    def model_name(self, asked: str | None) -> str:
        """The name to answer under. Raises `ApiError` 404 for a model that is not served."""
        if asked is None:
            return self.model.names[0]
        if asked in self.model.names or self.model.accepts_any_name:
            return asked
        names = ", ".join(map(repr, self.model.names))
        message = f"the model {asked!r} does not exist, this server has {names}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def model_card(self, name: str) -> ModelCard:
        """What /v1/models says of the model under `name`."""
        return ModelCard(id=name, created=self.model.created, max_model_len=self.model.max_len)

    @property
    def template_source(self) -> str:
        """The chat template as it is written, empty if there is none."""
        return "" if self._template is None else self._template.source

    def token_name(self, token_id: int | None) -> str:
        """What a control token is called, empty if there is none."""
        return "" if token_id is None else token_text(self.tokenizer.token_bytes(token_id))

    def ids_of_text(
        self, text: str, *, limited: bool = True, add_bos: bool | None = None, parse_special: bool = True
    ) -> TokenIds:
        """The ids of a raw prompt, in which control tokens are parsed unless told otherwise. In the pool.

        Raises `ApiError` without tokenizing if the text is certainly longer than the context; if not `limited`, since
        it will be cut or is only counted, longer than `MAX_CONTEXTS` of them.
        """
        self._refuse_hopeless(text, param="prompt", limited=limited)
        return tuple(self.tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special))

    def ids_of_chat(self, fields: ChatFields, *, now: datetime, limited: bool = True) -> TokenIds:
        """The ids of a conversation rendered. In the pool; raises as `rendered_chat` does."""
        return tuple(self.rendered_chat(fields, now=now, limited=limited).encode(self.tokenizer))

    def rendered_chat(self, fields: ChatFields, *, now: datetime, limited: bool = True) -> RenderedChat:
        """A conversation as the model is to see it, the time being `now`. In the pool.

        Raises `ApiError` for messages that are none, and as `ids_of_text` does; `TemplateError` or `ParamError` for
        messages the template refuses.
        """
        fields.check_chat()
        messages = normalised(fields.messages)
        if self._template is None:
            raise invalid("messages", "this model has no chat template: use /v1/completions")
        self._refuse_hopeless(*(message["content"] for message in messages), param="messages", limited=limited)
        rendered = self._template.render(
            messages,
            add_generation_prompt=fields.wants_generation_prompt,
            continue_final_message=bool(fields.continue_final_message),
            now=lambda: now,
            **(fields.chat_template_kwargs or {}),
        )
        self._refuse_hopeless(rendered.text, param="messages", limited=limited)  # templates may add without end
        return rendered

    def check_prompt(self, fields: GenerationFields, ids: TokenIds, *, param: str) -> TokenIds:
        """`ids` as the model is to see them: truncated if asked. Raises `ApiError` naming `param` if they do not fit.

        In the pool.
        """
        check_token_ids(param, ids, self.tokenizer.vocab_size)
        kept = fields.truncate_prompt_tokens
        if kept == -1:
            kept = max(1, self.model.max_len - max(1, fields.token_limit or 1))
        if kept is not None:
            ids = ids[-kept:]
        if not ids:
            raise invalid(param, f"{param} has no tokens")
        if len(ids) >= self.model.max_len:
            raise self._too_long(str(ContextLengthError(len(ids), self.model.max_len)), param)
        return ids

    def check_count(self, ids: Sequence[int], *, param: str) -> None:
        """Raise `ApiError` naming `param` if there are more `ids` than fit into `MAX_CONTEXTS` contexts."""
        most = MAX_CONTEXTS * self.model.max_len
        if len(ids) > most:
            message = f"{param} may hold {most} ids ({MAX_CONTEXTS} contexts), got {len(ids)}"
            raise self._too_long(message, param)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a piece of text that is no prompt of its own. In the pool."""
        return self.tokenizer.encode(text, parse_special=False, add_bos=False)

    def _refuse_hopeless(self, *texts: str, param: str, limited: bool) -> None:
        """Raise `ApiError` if `texts` have too many tokens even if each were the vocabulary's longest."""
        at_least = sum(len(text.encode()) for text in texts) // self._longest_token
        if at_least >= self.model.max_len * (1 if limited else MAX_CONTEXTS):
            message = ContextLengthError.message(f"at least {at_least}", self.model.max_len)
            raise self._too_long(message, param)

    @staticmethod
    def _too_long(message: str, param: str) -> ApiError:
        return invalid(param, message, code="context_length_exceeded")


def time_for(fields: ChatFields) -> datetime:
    """What to tell a conversation's template the time is: what the client says, else what it is, in whole seconds."""
    return fields.chat_template_now or datetime.now().astimezone().replace(microsecond=0)
