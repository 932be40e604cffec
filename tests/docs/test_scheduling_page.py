"""The example in docs/scheduling.md runs as it stands there, and prints what the page says it prints."""

import re
from pathlib import Path

import pytest

from scheduler.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(PRINTED,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_prints_what_the_page_says(capsys):
    exec(compile(CODE, "docs/scheduling.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == PRINTED


@pytest.mark.parametrize("path", re.findall(r"`((?:scheduler|tests)/[\w/]+\.py)`", PAGE))
def test_every_file_it_names_is_there(path):
    assert (ROOT / path).exists()


def test_every_metric_it_names_is_counted():
    table = PAGE[PAGE.index("| attribute |") :]
    names = re.findall(r"`(\w+)[`\[]", "\n".join(line.split("|")[1] for line in table.splitlines() if line[:1] == "|"))
    assert len(names) >= 10
    assert [name for name in names if not hasattr(Metrics(8), name)] == []
