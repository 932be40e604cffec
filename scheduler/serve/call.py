"""One client's call for text while it is answered: its requests, their events, and their end whatever happens."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Self

import msgspec

from engine.errors import ParamError
from engine.params import SamplingParams
from scheduler.events import Event, Finished, Timings, Usage
from scheduler.request import Request
from scheduler.seed import draw_seed
from scheduler.serve.service import Service, TokenIds
from scheduler.serve.wire.generation import CallFields
from scheduler.stream import EventStream

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What was asked, ready to run: one request per prompt. Choice i of prompt p has index p * n + i.

    `alias` is the name its client chose, which is part of `id`; `chat_template_now` what a conversation's template was
    told the time is.
    """

    id: str
    operation: Operation
    alias: str | None = None
    model: str
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    timings_per_token: bool = False
    chat_template_now: datetime | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls,
        fields: CallFields,
        *,
        operation: Operation,
        prefix: str,
        model: str,
        prompts: Sequence[TokenIds],
        params: SamplingParams,
        chat_template_now: datetime | None = None,
    ) -> Self:
        """The call for `prompts`, each with `params`; without a seed of the client's, each draws its own."""
        call_id = f"{prefix}-{fields.request_id or uuid.uuid4().hex}"
        requests = []
        for position, prompt_ids in enumerate(prompts):
            own = params
            if position and fields.seed is None:
                own = msgspec.structs.replace(params, seed=draw_seed())
            request_id = call_id if len(prompts) == 1 else f"{call_id}-{position}"
            requests.append(
                Request(
                    id=request_id,
                    prompt_ids=prompt_ids,
                    params=own,
                    n=fields.num_choices,
                    priority=fields.priority or 0,
                    reports_progress=bool(fields.stream and fields.return_progress),
                )
            )
        options = fields.stream_options
        return cls(
            id=call_id,
            operation=operation,
            alias=fields.request_id,
            model=model,
            requests=tuple(requests),
            stream=bool(fields.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            return_token_ids=bool(fields.return_token_ids),
            timings_per_token=bool(fields.timings_per_token),
            chat_template_now=chat_template_now,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What it can be asked for by: its id, and the name its client chose."""
        return (self.id,) if self.alias is None else (self.id, self.alias)

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return sum(request.n for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts together, each once whatever `n`."""
        return sum(len(request.prompt_ids) for request in self.requests)

    def index(self, position: int, choice: int) -> int:
        """The index of a choice of the prompt at `position`, among all choices of the answer."""
        return position * self.requests[0].n + choice


class RunningCall:
    """A submitted call. Its requests are in the queue or running; `close` ends those that are unfinished.

    `headers` came with it, if by HTTP. Raises `ParamError` if another call has its name or its prompts are more than an
    idle server takes, and what `Service.submit` raises, with none of the requests submitted.
    """

    def __init__(self, service: Service, call: Call, *, headers: Mapping[str, str]) -> None:
        for name in call.names:
            if name in service.calls:
                raise ParamError("request_id", f"request_id {name!r} is already running")
        service.engine.check_together(call.requests)
        self._names = call.names
        self._calls = service.calls
        self._calls.update(dict.fromkeys(call.names, tuple(request.id for request in call.requests)))
        self._streams: list[EventStream] = []
        try:
            for request in call.requests:
                self._streams.append(service.submit(request))
        except BaseException:
            self.close()
            raise
        if service.tracing is not None:
            service.tracing.begin(call, headers)

    async def events(self) -> AsyncGenerator[tuple[int, Event]]:
        """Every event with its prompt's position, until all requests have finished."""
        async with contextlib.aclosing(self.bursts()) as bursts:
            async for burst in bursts:
                for event in burst:
                    yield event

    async def bursts(self) -> AsyncGenerator[list[tuple[int, Event]]]:
        """The same, as many events at a time as have come: what one tick did, or several if the consumer is slow."""
        if len(self._streams) == 1:
            (stream,) = self._streams
            async for event in stream:
                yield [(0, event), *((0, more) for more in stream.arrived())]
            return
        # One task a stream, each waiting for one event: a slow consumer holds back every stream, and buffers nothing.
        waiting = {asyncio.ensure_future(anext(stream)): position for position, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                burst: list[tuple[int, Event]] = []
                for task in sorted(done, key=waiting.__getitem__):
                    position = waiting.pop(task)
                    stream = self._streams[position]
                    burst += [(position, event) for event in (task.result(), *stream.arrived())]
                    if not isinstance(burst[-1][1], Finished):
                        waiting[asyncio.ensure_future(anext(stream))] = position
                yield burst
        finally:
            for task in waiting:
                task.cancel()

    def close(self) -> None:
        """Abort what is unfinished: its slots are free when this returns."""
        for stream in self._streams:
            stream.close()
        for name in self._names:
            self._calls.pop(name, None)
        self._names = ()


def summed(finished: Sequence[Finished]) -> tuple[Usage, Timings]:
    """The tokens of all requests of a call together, and the times of the one that took longest."""
    usage = Usage(
        prompt_tokens=sum(event.usage.prompt_tokens for event in finished),
        completion_tokens=sum(event.usage.completion_tokens for event in finished),
    )
    return usage, max((event.timings for event in finished), key=lambda timings: timings.e2e_s)
