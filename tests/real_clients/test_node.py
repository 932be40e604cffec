"""The official `openai` client for Node: its own tests, run by Node."""

import os
import subprocess
from pathlib import Path

TESTS = Path(__file__).parent / "node"


def test_the_openai_client_for_node(server, hello):
    environment = os.environ | {"LOCKSTEP_URL": server.url, "LOCKSTEP_HELLO": hello}
    run = subprocess.run(
        ["node", "--test", "openai.test.mjs"], cwd=TESTS, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
