"""The example in docs/exactness.md: an answer comes again among others."""

import re
import subprocess
import sys
from pathlib import Path

from tests.live_server import LiveServer

PAGE = (Path(__file__).parents[2] / "docs" / "exactness.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_same_answer_comes_again(server: LiveServer):
    here = EXAMPLE.replace("8000", str(server.port))
    result = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("the same: ")
