"""The JSON socket's form of a call: a `generate` line to a call, events to lines."""

import uuid
from datetime import datetime

from scheduler.events import ChoiceFinished, Delta, Event, Finished, PromptProgress, PromptScored, Started
from scheduler.request import FinishReason, Request
from scheduler.serve.call import Call
from scheduler.serve.http.form import ids_of, logprobs_of
from scheduler.serve.service import Service, time_for
from scheduler.serve.wire.errors import failure_of
from scheduler.serve.wire.logprobs import chat_logprobs, prompt_logprobs
from scheduler.serve.wire.sampling import check_num_scored
from scheduler.serve.wire.socket import (
    ChoiceEnding,
    ErrorEvent,
    FinishedEvent,
    Generate,
    Id,
    SocketEvent,
    StartedEvent,
    TextEvent,
)
from scheduler.serve.wire.usage import WireTimings, WireUsage


def jsonl_call(service: Service, operation: Generate) -> Call:
    """The call a `generate` line asks for. In the pool.

    Raises `ApiError`, `ParamError` or `TemplateError` for whatever cannot be answered.
    """
    operation.check()
    model = service.model_name(operation.model)
    params = operation.sampling_params(
        logprobs=operation.logprobs,
        prompt_logprobs=operation.prompt_logprobs,
        vocab_size=service.tokenizer.vocab_size,
        encode=service.encode_plain,
    )
    limited = operation.truncate_prompt_tokens is None
    now: datetime | None = None
    match operation.prompt:
        case None:
            now = time_for(operation.chat)
            ids, param = service.ids_of_chat(operation.chat, now=now, limited=limited), "messages"
        case str(text):
            ids, param = service.ids_of_text(text, limited=limited), "prompt"
        case given:
            ids, param = tuple(given), "prompt"
    prompt = service.check_prompt(operation, ids, param=param)
    check_num_scored(len(prompt), params)
    request = Request(
        id=f"jsonl-{operation.request_id or uuid.uuid4().hex}",
        prompt_ids=prompt,
        params=params,
        n=operation.num_choices,
        priority=operation.priority or 0,
    )
    return Call(
        id=request.id,
        operation="chat" if operation.prompt is None else "text_completion",
        alias=operation.request_id,
        model=model,
        requests=(request,),
        stream=True,
        include_usage=True,
        continuous_usage=False,
        return_token_ids=True,
        chat_template_now=now,
    )


class JsonlForm:
    """The lines of one call, each with the `id` its client chose."""

    def __init__(self, service: Service, call: Call, client_id: Id) -> None:
        self._service = service
        self._call = call
        self._id = client_id
        (self._request,) = call.requests
        self._endings: list[ChoiceEnding] = []

    def line(self, event: Event) -> SocketEvent | None:
        """What `event` says to the client; None for what `finished` tells of."""
        match event:
            case Started():
                return self._started(event)
            case Delta():
                return self._text(event)
            case ChoiceFinished():
                ending = ChoiceEnding(
                    index=event.index,
                    finish_reason=event.reason,
                    stop_reason=event.stop_reason,
                    completion_tokens=event.num_tokens,
                )
                self._endings.append(ending)
                return None
            case PromptProgress() | PromptScored():
                return None
            case Finished():
                return self._finished(event)

    def _started(self, event: Started) -> StartedEvent:
        assert self._request.params.seed is not None
        line = StartedEvent(
            id=self._id,
            request_id=self._request.id,
            model=self._call.model,
            system_fingerprint=self._service.model.fingerprint,
            prompt_tokens=len(self._request.prompt_ids),
            seed=self._request.params.seed,
            queue_s=event.queue_s,
        )
        if self._call.chat_template_now is not None:
            line.chat_template_now = self._call.chat_template_now
        return line

    def _text(self, event: Delta) -> TextEvent:
        line = TextEvent(id=self._id, index=event.index, text=event.text, token_ids=ids_of(event.tokens))
        if self._request.params.logprobs is not None:
            line.logprobs = chat_logprobs(logprobs_of(event.tokens), self._service.tokenizer.token_bytes).content
        return line

    def _finished(self, event: Finished) -> FinishedEvent | ErrorEvent:
        if event.reason is FinishReason.ERROR:
            return ErrorEvent(id=self._id, error=failure_of(event).envelope.error)
        line = FinishedEvent(
            id=self._id,
            finish_reason=event.reason,
            choices=sorted(self._endings, key=lambda ending: ending.index),
            usage=WireUsage.of(event.usage),
            timings=WireTimings.of(event.timings, event.usage),
        )
        if event.prompt_logprobs is not None:
            line.prompt_logprobs = prompt_logprobs(event.prompt_logprobs, self._service.tokenizer.token_bytes)
        return line
