"""The fixture as its users have it: pytest run in a folder of its own, the plugin found through its entry point."""

import os
import re

import pytest

from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

HEAVY = "aiohttp", "click", "engine", "jinja2", "msgspec", "llvmlite", "numpy", "rich", "scheduler", "structlog"

USES_THE_SERVER = """
    import json
    import os
    import urllib.request

    PIDS = []

    def ask(server, path, body=None):
        with urllib.request.urlopen(server.url + path, data=body and json.dumps(body).encode()) as response:
            return json.load(response)

    def test_it_answers(lockstep_server):
        asked = {"model": lockstep_server.model, "prompt": "Hello", "max_tokens": 2}
        assert ask(lockstep_server, "/v1/completions", asked)["usage"]["prompt_tokens"] == 5
        PIDS.append(lockstep_server.pid)

    def test_it_is_the_same_one(lockstep_server):
        assert PIDS == [lockstep_server.pid]
        assert len(ask(lockstep_server, "/slots")) == 3
        assert lockstep_server.model == "tiny"
        assert "loading" in lockstep_server.log.read_text()
        print("server", lockstep_server.pid)
"""


@pytest.fixture
def project(pytester):
    """A folder with a model, and tests that are to be run by `pytester.runpytest_subprocess`."""
    write_tiny_llama(pytester.path / "tiny.gguf")
    pytester.makeini(
        """
        [pytest]
        lockstep_model = tiny.gguf
        lockstep_options = --slots 3 --kernels reference
        """
    )
    return pytester


def test_one_server_runs_for_all_tests_and_is_gone_afterwards(project):
    project.makepyfile(USES_THE_SERVER)
    result = project.runpytest_subprocess("-s")
    result.assert_outcomes(passed=2)
    pid = re.search(r"server (\d+)", result.stdout.str())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid[1]), 0)


def test_a_folder_whose_modules_have_our_names_does_not_matter(project):
    for name in ("clients", "engine", "scheduler"):
        project.mkpydir(name)
    project.makepyfile(USES_THE_SERVER)
    project.runpytest_subprocess("--import-mode=importlib").assert_outcomes(passed=2)


def test_paths_are_relative_to_the_root_folder_wherever_pytest_is_started(project, monkeypatch):
    path = project.makepyfile(USES_THE_SERVER)
    project.mkdir("elsewhere")
    monkeypatch.chdir(project.path / "elsewhere")
    project.runpytest_subprocess(str(path)).assert_outcomes(passed=2)


def test_a_server_that_cannot_start_says_why(project):
    project.makepyfile(USES_THE_SERVER)
    result = project.runpytest_subprocess("-o", "lockstep_model=missing.gguf")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*lockstep serve did not start:*", "*missing.gguf*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_run_that_does_not_ask_for_it_starts_no_server_and_imports_nothing_for_it(pytester):
    pytester.makepyfile(
        f"""
        import sys

        def test_nothing_of_ours_is_there():
            assert "clients.pytest_plugin" in sys.modules
            assert not set(sys.modules) & {set(HEAVY)}
        """
    )
    pytester.runpytest_subprocess("-p", "no:asyncio", "-W", "error").assert_outcomes(passed=1)
