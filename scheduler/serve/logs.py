"""What is logged, and how: one event per request at its end, on stderr, never the text of a prompt or an answer."""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from scheduler.events import Finished
from scheduler.serve.settings import LogFormat


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
    """Log the end of one request: counts, where the time went, why it ended; with a traceback if by a fault of ours."""
    timings, usage = finished.timings, finished.usage
    log: structlog.stdlib.BoundLogger = structlog.get_logger("lockstep.request")
    failed = {} if finished.error is None else {"error": finished.error, "exc_info": finished.cause}
    log.log(
        logging.ERROR if failed else logging.INFO,
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
    )
