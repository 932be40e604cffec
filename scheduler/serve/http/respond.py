"""From an HTTP request for text to its response: submit, then collect or stream, and end what a gone client left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import structlog
from aiohttp import web

from scheduler.collected import CollectedChoice
from scheduler.events import ChoiceFinished, Delta, Finished
from scheduler.request import FinishReason
from scheduler.serve.call import RunningCall
from scheduler.serve.http.app_keys import SERVING, SETTINGS
from scheduler.serve.http.body import json_response, read_body
from scheduler.serve.http.form import Form
from scheduler.serve.http.sse import EventWriter
from scheduler.serve.service import Service
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.errors import REFUSALS, ApiError, as_api_error, failure_of, internal_error

Prepare = Callable[[Service, bytes], Form]

SMALL_ANSWER = 512
"""Tokens with their likeliest rivals that are written down in a few milliseconds; more of them off the event loop."""


async def answer(request: web.Request, prepare: Prepare) -> web.StreamResponse:
    """The response to a call for text, whose body `prepare` understands.

    Everything that can be refused is refused before the first byte of an answer. If the client goes away this is
    cancelled, and the call's slots are free.
    """
    settings = request.app[SETTINGS]
    service = request.app[SERVING].get()
    form = await service.off_loop(prepare, service, await read_body(request))
    running = RunningCall(service, form.call, headers=request.headers)
    try:
        if form.call.stream:
            return await _stream(request, form, running, settings)
        choices, finished = await _collect(form, running, settings)
    finally:
        running.close()

    def whole() -> web.Response:
        return json_response(form.whole(choices, finished))

    return await service.off_loop(whole) if _num_entries(choices, finished) > SMALL_ANSWER else whole()


def _num_entries(choices: Sequence[CollectedChoice], finished: Sequence[Finished]) -> int:
    """How many tokens an answer may have to tell of, those of a prompt for each of its choices."""
    num_scored = max(len(event.prompt_logprobs or ()) for event in finished)
    return sum(num_scored + len(choice.tokens) for choice in choices)


async def _collect(
    form: Form, running: RunningCall, settings: ServeSettings
) -> tuple[list[CollectedChoice], list[Finished]]:
    """All choices, and the end of every request. Raises `ApiError` if one failed."""
    call = form.call
    choices = [CollectedChoice() for _ in range(call.num_choices)]
    finished: dict[int, Finished] = {}
    async with _time_limit(settings), contextlib.aclosing(running.events()) as events:
        async for position, event in events:
            match event:
                case Delta():
                    choices[call.index(position, event.index)].add(event)
                case ChoiceFinished():
                    choices[call.index(position, event.index)].end = event
                case Finished():
                    _raise_if_failed(event)
                    finished[position] = event
                case _:
                    pass
    return choices, _in_order(finished)


async def _stream(
    request: web.Request, form: Form, running: RunningCall, settings: ServeSettings
) -> web.StreamResponse:
    """The answer as server-sent events. An error is the last of them; OpenAI's forms have `[DONE]` behind it."""
    async with EventWriter(request, ping_s=settings.sse_ping, write_timeout_s=settings.write_timeout) as writer:
        try:
            await _stream_events(form, running, settings, writer)
        except ConnectionError:
            raise
        except REFUSALS as error:
            await writer.send(as_api_error(error).envelope, done=form.has_done)
        except Exception:  # noqa: BLE001 - logged; the status line is sent, so the stream itself must say so
            structlog.get_logger("lockstep.http").exception("stream failed", request_id=form.call.id)
            await writer.send(internal_error().envelope, done=form.has_done)
        return await writer.end()


async def _stream_events(form: Form, running: RunningCall, settings: ServeSettings, writer: EventWriter) -> None:
    """Write every event of the call in its form. Raises `ApiError` if it failed."""
    call = form.call
    num_ended = 0
    last: tuple[int, ChoiceFinished] | None = None
    finished: dict[int, Finished] = {}
    async with _time_limit(settings), contextlib.aclosing(running.bursts()) as bursts:
        async for burst in bursts:
            chunks: list[object] = []
            for position, event in burst:
                match event:
                    case ChoiceFinished() if event.reason is not FinishReason.ERROR:
                        num_ended += 1
                        if num_ended < call.num_choices:
                            chunks += form.ends(position, event)
                        else:
                            # The last end waits for the costs of the whole, which come in the same tick.
                            last = position, event
                    case ChoiceFinished():
                        pass
                    case Finished():
                        finished[position] = event
                    case _:
                        chunks += form.news(position, event)
            if any(event.reason is FinishReason.ERROR for event in finished.values()):
                await writer.send(*chunks)
                for event in finished.values():
                    _raise_if_failed(event)
            if len(finished) == len(call.requests):
                assert last is not None
                chunks += form.ends(*last, _in_order(finished))
                await writer.send(*chunks, done=form.has_done)
            else:
                await writer.send(*chunks)


@contextlib.asynccontextmanager
async def _time_limit(settings: ServeSettings) -> AsyncIterator[None]:
    """Raise `ApiError` 504 if what is inside takes longer than a request may."""
    try:
        async with asyncio.timeout(settings.request_timeout):
            yield
    except TimeoutError:
        limit = settings.request_timeout
        raise ApiError(504, f"the request took longer than {limit} s", kind="timeout", code="request_timeout") from None


def _raise_if_failed(finished: Finished) -> None:
    if finished.reason is FinishReason.ERROR:
        raise failure_of(finished)


def _in_order(finished: dict[int, Finished]) -> list[Finished]:
    return [finished[position] for position in sorted(finished)]
