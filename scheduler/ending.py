"""When a choice is over, and what is said of a request whose choices all are."""

from typing import NamedTuple

from engine.batch import RowError
from scheduler.events import Finished, Timings, Usage
from scheduler.request import FinishReason
from scheduler.sequence import Sequence


class Ending(NamedTuple):
    """Why a choice is over; `stop_reason` is the stop string or stop token id that matched, if one did."""

    reason: FinishReason
    stop_reason: str | int | None = None


def ending_by_id(sequence: Sequence, eos_ids: frozenset[int]) -> Ending | None:
    """The end that the newest token brings by its id, if it does: EOS, then stop tokens."""
    params = sequence.request.params
    token_id = sequence.output_ids[-1]
    if token_id in eos_ids and not params.ignore_eos:
        return Ending(FinishReason.STOP)
    if token_id in params.stop_token_ids:
        return Ending(FinishReason.STOP, token_id)
    return None


def hides_its_token(ending: Ending, *, include_stop: bool) -> bool:
    """Whether the token that brought `ending` by its id has no place in the text: an EOS never has."""
    return ending.stop_reason is None or not include_stop


_SEVERITY = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


def finished(choices: tuple[Sequence, ...], now: float, error: RowError | None) -> Finished:
    """The terminal event of a request whose `choices` are all over."""
    first = choices[0]
    reasons = tuple(choice.finish_reason for choice in choices if choice.finish_reason is not None)
    prompt_logprobs = None
    if first.request.params.prompt_logprobs is not None:
        prompt_logprobs = (None, *first.prompt_logprobs)
    return Finished(
        request_id=first.request.id,
        reason=next(reason for reason in _SEVERITY if reason in reasons),
        choice_reasons=reasons,
        usage=Usage(min(first.num_computed, first.num_prompt), sum(len(choice.output_ids) for choice in choices)),
        timings=_timings(choices, now),
        error=error.message if error else None,
        cause=error.cause if error else None,
        prompt_logprobs=prompt_logprobs,
    )


def _timings(choices: tuple[Sequence, ...], now: float) -> Timings:
    """Where the time went. Each part ends where the next begins, or at `now` if that was never reached."""
    t_arrival = choices[0].t_arrival
    t_admitted = min((c.t_admitted for c in choices if c.t_admitted is not None), default=now)
    t_first_token = min((c.t_first_token for c in choices if c.t_first_token is not None), default=None)
    t_decoding = now if t_first_token is None else t_first_token
    queue_s, prefill_s, decode_s = t_admitted - t_arrival, t_decoding - t_admitted, now - t_decoding
    return Timings(
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        e2e_s=queue_s + prefill_s + decode_s,
        ttft_s=None if t_first_token is None else queue_s + prefill_s,
    )
