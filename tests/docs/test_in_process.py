"""The examples in docs/in-process.md run as they stand there."""

import re
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "in-process.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
CODE = [code for language, code in BLOCKS if language == "python"]
PROGRAMS = [code for code in CODE if "lockstep_server" not in code]
(TEST,) = [code for code in CODE if "lockstep_server" in code]
(INI,) = [code for language, code in BLOCKS if language == "ini"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_tiny_llama(tmp_path / "model.gguf", max_context=512)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("code", PROGRAMS, ids=range(len(PROGRAMS)))
def test_every_program_of_the_page_runs(code):
    exec(compile(code, PAGE.name, "exec"), {"__name__": "__main__"})


def test_the_page_has_all_its_programs():
    assert len(PROGRAMS) == 6


@pytest.mark.parametrize("name", re.findall(r"`(\w+Error)`", PAGE.read_text(encoding="utf-8")))
def test_every_error_of_the_page_is_one_of_the_engines(name):
    import engine.errors

    assert issubclass(getattr(engine.errors, name), engine.errors.LockstepError)


def test_the_test_of_the_page_passes(pytester):
    write_tiny_llama(pytester.path / "model.gguf", max_context=512)
    pytester.makeini(INI)
    pytester.makepyfile(TEST)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
