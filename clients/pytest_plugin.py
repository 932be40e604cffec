"""The pytest fixture `lockstep_server`: a running `lockstep serve` on a free port, one for the whole session.

pytest loads this module in every run of an environment Lockstep is installed in, so it imports nothing but the standard
library and pytest.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class LockstepServer:
    """A server that is ready: its `url` (without /v1), its `model` name, its process, and the file it logs to."""

    url: str
    model: str
    pid: int
    log: Path


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini options."""
    parser.addini("lockstep_model", "What `lockstep serve` serves: the path of a .gguf file or a known name.")
    parser.addini("lockstep_options", "Further options of `lockstep serve`, such as --slots 4.", type="args")


@pytest.fixture(scope="session")
def lockstep_server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockstepServer]:
    """A running `lockstep serve` on a free port of this machine, stopped at the end of the session.

    It serves the ini option `lockstep_model`, by default the default model, with `lockstep_options`. Paths are relative
    to pytest's root folder.
    """
    model = pytestconfig.getini("lockstep_model")
    # Not -m alone: it would look for our packages in the current folder first, where others may have the same names.
    command = [sys.executable, "-P", "-m", "clients.cli", "serve", *filter(None, [model])]
    command += ["--port", "0", "--grace", "0", *pytestconfig.getini("lockstep_options")]
    log = tmp_path_factory.mktemp("lockstep") / "server.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(  # noqa: S603 - our own command, with what the project's own settings add
            command, cwd=pytestconfig.rootpath, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
        )
    with process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                pytest.fail(f"lockstep serve did not start: {log.read_text(errors='replace')}", pytrace=False)
            ready = json.loads(line)
            yield LockstepServer(ready["url"], ready["model"], process.pid, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
