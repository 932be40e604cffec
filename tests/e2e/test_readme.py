"""What the README tells people to type."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live_server import LiveServer

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```(python|bash)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(("language", "source"), EXAMPLES, ids=lambda text: text.split("\n")[0])
def test_an_example_runs_and_knows_the_capital_of_france(server: LiveServer, language, source):
    shell = {"python": [sys.executable, "-c"], "bash": ["bash", "-ec"]}[language]
    here = source.replace("8000", str(server.port)).replace("8001", str(server.ready["jsonl_port"]))
    result = subprocess.run([*shell, here], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def test_there_are_examples():
    assert [language for language, _ in EXAMPLES] == ["bash", "python", "python", "python"]


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
