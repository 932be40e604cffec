"""What is logged, and how: one event per request at its end, on stderr, never the text of a prompt or an answer."""

import logging
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from engine.errors import ParamError
from scheduler.events import Finished
from scheduler.serve.settings import LogFormat
from scheduler.serve.wire.errors import ApiError

REFUSED = "refused"
REFUSALS_PER_MINUTE = 60
"""As many as are logged: whoever may not even call must not fill the disk."""
OF_TAKEN_IN = frozenset({500, 504})
"""Failures of what was taken in, which has an event of its own."""
_FIELD_NAME = re.compile(r"[a-z_]{1,40}", re.ASCII)


class PerMinute:
    """Lets an event through `limit` times in a minute; the next one after that says how many were `unlogged`."""

    def __init__(self, event: str, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._event = event
        self._limit = limit
        self._clock = clock
        self._minute = 0
        self._num_logged = 0
        self._num_unlogged = 0

    def __call__(self, _logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
        """Act as a processor of structlog."""
        if event_dict["event"] != self._event:
            return event_dict
        minute = int(self._clock() // 60)
        if minute != self._minute:
            self._minute, self._num_logged = minute, 0
        if self._num_logged == self._limit:
            self._num_unlogged += 1
            raise structlog.DropEvent
        self._num_logged += 1
        if self._num_unlogged:
            event_dict["unlogged"], self._num_unlogged = self._num_unlogged, 0
        return event_dict


def configure(log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send structlog's events and the standard library's records (asyncio's, aiohttp's) to `stream`, else to stderr."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            PerMinute(REFUSED, REFUSALS_PER_MINUTE),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    target = sys.stderr if stream is None else stream
    # A process started with `2>&-` has no stderr.
    handler = logging.NullHandler() if target is None else logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(log_format, colors=target is not None and target.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def _renderers(log_format: LogFormat, *, colors: bool) -> list[Processor]:
    """Tracebacks are plain text in both forms: the richer ones print local variables, and prompts are among them."""
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]


def log_finished(finished: Finished) -> None:
    """Log the end of one request: counts, where the time went, why it ended; with a traceback if by a fault of ours.

    A client's mistake may show only on the way, where no token is left to choose: that is told as what it is.
    """
    timings, usage = finished.timings, finished.usage
    log: structlog.stdlib.BoundLogger = structlog.get_logger("lockstep.request")
    is_ours = finished.error is not None and not isinstance(finished.cause, ParamError)
    failed = {} if finished.error is None else {"error": finished.error}
    traceback = {"exc_info": finished.cause} if is_ours else {}
    log.log(
        logging.ERROR if is_ours else logging.INFO,
        "request",
        request_id=finished.request_id,
        reason=finished.reason.value,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=round(timings.queue_s, 6),
        prefill_s=round(timings.prefill_s, 6),
        decode_s=round(timings.decode_s, 6),
        e2e_s=round(timings.e2e_s, 6),
        ttft_s=None if timings.ttft_s is None else round(timings.ttft_s, 6),
        **failed,
        **traceback,
    )


def log_refused(error: ApiError, path: str | None) -> None:
    """Log what was not taken in: where it was sent to, and of its fault only what is no client's own words."""
    if error.status in OF_TAKEN_IN:
        return
    body = error.envelope.error
    log: structlog.stdlib.BoundLogger = structlog.get_logger("lockstep.request")
    is_field = body.param is not None and _FIELD_NAME.fullmatch(body.param)
    log.info(REFUSED, status=error.status, code=body.code, path=path, param=body.param if is_field else None)
