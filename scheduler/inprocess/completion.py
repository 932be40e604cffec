"""A whole answer, put together from its events."""

from collections.abc import Iterable

import msgspec

from engine.batch import TokenLogprobs
from engine.errors import GenerationError, LockstepError
from scheduler.collected import CollectedChoice
from scheduler.events import (
    ChoiceFinished,
    Delta,
    Event,
    Finished,
    PromptProgress,
    PromptScored,
    Started,
    Timings,
    Usage,
)
from scheduler.request import FinishReason, Request


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of the prompt.

    `ids` are all its sampled tokens, the one that ended it included; `logprobs` has an entry for each if the params
    asked for them. `stop_reason` is the stop string or stop token id that matched, None for EOS and the rest.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request: `n` choices, and what they cost together.

    With the same `seed`, drawn if the params had none, the same answer comes again. `prompt_logprobs` has one entry per
    prompt token, None for the first, if the params asked for them.
    """

    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    seed: int
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        """The first choice's."""
        return self.choices[0].ids

    @property
    def finish_reason(self) -> FinishReason:
        """The first choice's."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The first choice's."""
        return self.choices[0].logprobs


def completion_of(request: Request, events: Iterable[Event]) -> Completion:
    """The answer to `request` that all its `events` tell of, in their order."""
    choices = [CollectedChoice() for _ in range(request.n)]
    finished: Finished | None = None
    for event in events:
        match event:
            case Delta():
                choices[event.index].add(event)
            case ChoiceFinished():
                choices[event.index].end = event
            case Finished():
                finished = event
            case Started() | PromptProgress() | PromptScored():
                pass
    assert finished is not None
    assert request.params.seed is not None
    return Completion(
        prompt_ids=request.prompt_ids,
        choices=tuple(_choice(choice, request) for choice in choices),
        seed=request.params.seed,
        usage=finished.usage,
        timings=finished.timings,
        prompt_logprobs=finished.prompt_logprobs,
    )


def _choice(so_far: CollectedChoice, request: Request) -> Choice:
    assert so_far.end is not None
    logprobs = tuple(token.logprobs for token in so_far.tokens if token.logprobs is not None)
    return Choice(
        text=so_far.text,
        ids=tuple(token.token_id for token in so_far.tokens),
        finish_reason=so_far.end.reason,
        stop_reason=so_far.end.stop_reason,
        logprobs=None if request.params.logprobs is None else logprobs,
    )


def raise_if_failed(finished: Finished) -> None:
    """Raise what a request failed of: the refusal it met while running, else `GenerationError` from the fault."""
    if finished.reason is FinishReason.ERROR:
        if isinstance(finished.cause, LockstepError):
            raise finished.cause
        raise GenerationError(finished.error or "the request failed") from finished.cause
