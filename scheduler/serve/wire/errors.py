"""Refusals in OpenAI's envelope: `{"error":{"message","type","param","code"}}`."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from engine.errors import (
    ContextLengthError,
    DrainingError,
    LockstepError,
    ParamError,
    QueueFullError,
    TemplateError,
)
from scheduler.events import Finished

INVALID_REQUEST = "invalid_request_error"
RETRY_AFTER_S = 1
"""Seconds after which a client may ask again where nothing better is known."""


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, for people (`message`) and for programs (the rest)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and of the error event of a stream that had begun."""

    error: ErrorBody


class ApiError(LockstepError):
    """A call that gets no answer: its HTTP status, its envelope and the headers that go with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.status = status
        self.headers = headers
        # Names come out of URLs and bodies: what is no Unicode text must not keep the refusal from being sent.
        encodable = message.encode("utf-8", "replace").decode()
        self.envelope = ErrorEnvelope(ErrorBody(encodable, kind, param, code))
        super().__init__(encodable)


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """The 400 that names a parameter."""
    return ApiError(400, message, param=param, code=code)


def internal_error(message: str = "the server failed to answer this request") -> ApiError:
    """The 500 that says nothing of our insides: those are in the log."""
    return ApiError(500, message, kind="server_error", code="internal_error")


REFUSALS = (ApiError, ParamError, ContextLengthError, TemplateError, QueueFullError, DrainingError)
"""What a client is told of, for `except`. Any other error is a fault of ours: it goes to the log."""


def as_api_error(
    error: ApiError | ParamError | ContextLengthError | TemplateError | QueueFullError | DrainingError,
) -> ApiError:
    """The refusal that tells a client of `error`, one of `REFUSALS`."""
    match error:
        case ApiError():
            return error
        case ParamError():
            return invalid(error.param, str(error))
        case ContextLengthError():
            return invalid("prompt", str(error), code="context_length_exceeded")
        case TemplateError():
            return invalid("messages", str(error))
        case QueueFullError():
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(max(RETRY_AFTER_S, math.ceil(error.retry_after_s)))},
            )
        case DrainingError():
            return unavailable("the server is shutting down")


def failure_of(finished: Finished) -> ApiError:
    """What a client is told of a request that ended with an error: its own mistake if it was one."""
    if isinstance(finished.cause, ParamError):
        return as_api_error(finished.cause)
    return internal_error(finished.error) if finished.error else internal_error()


def unavailable(message: str) -> ApiError:
    """The 503 of a server that is not serving yet, or no longer."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(503, message, kind="service_unavailable", code="unavailable", headers=headers)
