"""docs/operating.md shows the log lines a server writes, and names no option that is not there."""

import io
import json
import re
from pathlib import Path

import msgspec
import pytest

from scheduler.events import Finished, Timings, Usage
from scheduler.request import FinishReason
from scheduler.serve import logs
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.errors import ApiError

pytestmark = pytest.mark.usefixtures("untouched_logging")

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
OPTIONS = {field.name for field in msgspec.structs.fields(ServeSettings)}


def test_its_log_lines_have_the_fields_that_are_logged():
    stream = io.StringIO()
    logs.configure("json", stream)
    timings = Timings(queue_s=0.0, prefill_s=0.12, decode_s=0.4, e2e_s=0.52, ttft_s=0.12)
    logs.log_finished(Finished("chatcmpl-1f0c", FinishReason.STOP, (FinishReason.STOP,), Usage(31, 10), timings))
    logs.log_refused(ApiError(401, "", code="invalid_api_key"), "/v1/models")

    (block,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    shown = [json.loads(line) for line in block.splitlines()]
    logged = [json.loads(line) for line in stream.getvalue().splitlines()]
    for line in (*shown, *logged):
        del line["timestamp"]
    assert shown == logged


def test_it_names_no_option_that_is_not_there():
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]+)", PAGE)}
    assert named <= OPTIONS


def test_its_unit_stops_no_sooner_than_running_requests_may_end():
    (grace,) = (field.default for field in msgspec.structs.fields(ServeSettings) if field.name == "grace")
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", PAGE, re.MULTILINE)
    assert int(seconds) > grace
