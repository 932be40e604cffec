import io
import json
import logging

import pytest
import structlog

from engine.errors import ParamError
from scheduler.events import Finished, Timings, Usage
from scheduler.request import FinishReason
from scheduler.serve import logs
from scheduler.serve.wire.errors import ApiError, invalid

pytestmark = pytest.mark.usefixtures("untouched_logging")


def _finished(**fields):
    return Finished(
        request_id="r1",
        reason=FinishReason.STOP,
        choice_reasons=(FinishReason.STOP,),
        usage=Usage(prompt_tokens=7, completion_tokens=3),
        timings=Timings(queue_s=0.5, prefill_s=0.25, decode_s=0.125, e2e_s=0.875, ttft_s=0.75),
        **fields,
    )


def _json_lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_is_one_event_with_counts_times_and_reason():
    stream = io.StringIO()
    logs.configure("json", stream)
    logs.log_finished(_finished())
    (line,) = _json_lines(stream)
    del line["timestamp"]
    assert line == {
        "event": "request",
        "level": "info",
        "request_id": "r1",
        "reason": "stop",
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "queue_s": 0.5,
        "prefill_s": 0.25,
        "decode_s": 0.125,
        "e2e_s": 0.875,
        "ttft_s": 0.75,
    }


def test_a_failed_request_says_why():
    stream = io.StringIO()
    logs.configure("json", stream)
    logs.log_finished(_finished(error="the sampler failed", cause=ValueError("not finite")))
    (line,) = _json_lines(stream)
    assert (line["error"], line["level"]) == ("the sampler failed", "error")
    assert "ValueError: not finite" in line["exception"]


def test_records_of_the_standard_library_come_out_in_the_same_form():
    stream = io.StringIO()
    logs.configure("json", stream)
    logging.getLogger("asyncio").error("a task %s", "failed")
    (line,) = _json_lines(stream)
    assert (line["event"], line["level"]) == ("a task failed", "error")


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_names_the_error_but_prints_no_local_variables(log_format):
    stream = io.StringIO()
    logs.configure(log_format, stream)
    prompt = "secret"
    try:
        _ = {}[len(prompt)]
    except KeyError:
        structlog.get_logger().exception("failed")
    text = stream.getvalue()
    assert "Traceback" in text
    assert "KeyError" in text
    assert "secret" not in text
    assert log_format == "console" or len(text.splitlines()) == 1


def test_the_console_form_is_one_readable_line_without_colours_when_not_a_terminal():
    stream = io.StringIO()
    logs.configure("console", stream)
    logs.log_finished(_finished())
    (line,) = stream.getvalue().splitlines()
    assert "request_id=r1" in line
    assert "\x1b" not in line


def test_a_refusal_is_one_event_without_its_words():
    stream = io.StringIO()
    logs.configure("json", stream)
    logs.log_refused(ApiError(429, "too much", param="secret\x1b words", code="queue_full"), "/v1/completions")
    logs.log_refused(invalid("temperature", "temperature must be finite, got secret"), None)
    lines = _json_lines(stream)
    assert [(line["event"], line["level"]) for line in lines] == [("refused", "info")] * 2
    assert [(line["status"], line["code"], line["path"], line["param"]) for line in lines] == [
        (429, "queue_full", "/v1/completions", None),
        (400, None, None, "temperature"),
    ]
    assert "secret" not in stream.getvalue()


@pytest.mark.parametrize("status", [500, 504])
def test_what_was_taken_in_before_it_failed_has_its_own_event(status):
    stream = io.StringIO()
    logs.configure("json", stream)
    logs.log_refused(ApiError(status, "no"), "/v1/completions")
    assert stream.getvalue() == ""


def test_a_flood_of_one_event_is_counted_and_the_rest_is_let_through():
    now = 0.0
    limit = logs.PerMinute("refused", 2, clock=lambda: now)

    def passed(event="refused"):
        try:
            return limit(None, "info", {"event": event})
        except structlog.DropEvent:
            return None

    assert [passed(), passed(), passed(), passed()] == [{"event": "refused"}] * 2 + [None] * 2
    assert passed("request") == {"event": "request"}
    now = 60.0
    assert [passed(), passed(), passed()] == [{"event": "refused", "unlogged": 2}, {"event": "refused"}, None]


def test_a_clients_mistake_that_shows_on_the_way_is_no_error_of_ours():
    stream = io.StringIO()
    logs.configure("json", stream)
    cause = ParamError("bad_words", "bad_words leave no token")
    logs.log_finished(_finished(error=str(cause), cause=cause))
    (line,) = _json_lines(stream)
    assert (line["error"], line["level"]) == ("bad_words leave no token", "info")
    assert "exception" not in line
