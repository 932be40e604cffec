"""What a client asked for: frozen, validated, independent of how it is going."""

import enum

import msgspec

from engine.params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended. `stop` covers EOS, stop token ids and stop strings; `length` also a full context."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted call: `n` independent continuations of one prompt.

    `params.seed` is always set here (the service draws one if the client gave none), so that any answer can be had
    again; choice i draws from (seed, i). Of the requests that wait, those with a lower `priority` start first.
    `reports_progress` makes every prefill chunk an event.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    reports_progress: bool = False
