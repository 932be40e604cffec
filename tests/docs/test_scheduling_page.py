"""The examples in docs/scheduling.md run as they stand there, and print and draw what the page says and shows."""

import re
from pathlib import Path

import pytest

from scheduler.events import Finished, Timings, Usage
from scheduler.metrics import Metrics
from scheduler.request import FinishReason
from scheduler.serve import logs
from scheduler.serve.wire.errors import invalid
from tests.policy_curves import picture

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
COMPARE, REPLAY = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(PRINTED,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_prints_what_the_page_says(capsys):
    exec(compile(COMPARE, "docs/scheduling.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == PRINTED


@pytest.mark.usefixtures("untouched_logging")
def test_the_log_of_a_server_is_replayed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Path("server.log").open("w", encoding="utf-8") as log:
        logs.configure("json", log)
        for number in range(3):
            timings = Timings(queue_s=0.0, prefill_s=0.02, decode_s=0.1, e2e_s=0.12, ttft_s=0.02)
            reason = FinishReason.LENGTH
            logs.log_finished(Finished(f"r{number}", reason, (reason,), Usage(8, 5), timings))
        logs.log_refused(invalid("n", "n must be in [1, 128], got 0"), "/v1/completions")
    assert len(Path("server.log").read_text(encoding="utf-8").splitlines()) == 4

    exec(compile(REPLAY, "docs/scheduling.md", "exec"), {"__name__": "__main__"})

    measured, simulated = capsys.readouterr().out.splitlines()
    assert measured == "first token, measured:  0.020 s on average"
    assert re.fullmatch(r"first token, simulated: 0\.0\d\d s", simulated)


@pytest.mark.slow
def test_the_picture_is_what_the_simulations_give():
    assert (ROOT / "docs" / "policies.svg").read_text(encoding="utf-8") == picture()


@pytest.mark.parametrize("path", re.findall(r"`((?:scheduler|tests)/[\w/]+\.py)`", PAGE))
def test_every_file_it_names_is_there(path):
    assert (ROOT / path).exists()


def test_every_metric_it_names_is_counted():
    table = PAGE[PAGE.index("| attribute |") :]
    names = re.findall(r"`(\w+)[`\[]", "\n".join(line.split("|")[1] for line in table.splitlines() if line[:1] == "|"))
    assert len(names) >= 10
    assert [name for name in names if not hasattr(Metrics(8), name)] == []
