import importlib
import importlib.metadata
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from clients.cli import LazyGroup, bench, cli
from clients.errors import ClientError
from engine.errors import LockstepError

LAZY = [(group, name) for group in (cli, bench) for name in group._lazy]


def modules_after(*arguments: str) -> set[str]:
    """What a process has imported when the command is over."""
    run = f"cli({list(arguments)}, standalone_mode=False)"
    source = f"import sys; from clients.cli import cli; {run}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    return set(output.splitlines()[-1].split())


def test_help_imports_none_of_the_commands():
    """Its start-up time is that of Python and click alone."""
    loaded = modules_after("--help")
    assert "click" in loaded
    assert loaded.isdisjoint({"numpy", "llvmlite", "aiohttp", "asyncio", "msgspec", "rich", "jinja2", "scheduler"})


@pytest.mark.slow
@pytest.mark.parametrize("command", ["chat", "pull", "bench", "serve"])
def test_a_command_starts_without_the_engines_arrays(command):
    assert modules_after(command, "--help").isdisjoint({"numpy", "llvmlite", "tokenizers"})


@pytest.mark.parametrize(("group", "name"), LAZY)
def test_every_lazy_command_is_there_and_called_so(group, name):
    module, attribute = group._lazy[name].where.split(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help


def test_help_lists_every_command():
    output = CliRunner().invoke(cli, ["--help"]).output
    for name in ("serve", "pull", "chat", "generate", "bench", "version"):
        assert f"\n  {name} " in output


def test_bench_alone_shows_its_help():
    assert "Commands:" in CliRunner().invoke(cli, ["bench"]).output


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(cli, ["sreve"])
    assert result.exit_code == 2
    assert "No such command 'sreve'" in result.output


@pytest.mark.parametrize(
    "error", [ClientError("no server"), LockstepError("bad file"), PermissionError(13, "Permission denied", "/cache")]
)
def test_expected_errors_are_one_line_and_exit_code_1(error):
    @click.command()
    def fails() -> None:
        raise error

    group = LazyGroup(lazy={}, commands={"fails": fails})
    result = CliRunner().invoke(group, ["fails"])
    assert result.exit_code == 1
    assert result.output == f"Error: {error}\n"


def test_too_little_memory_is_one_line_and_exit_code_1():
    @click.command()
    def fails() -> None:
        raise MemoryError

    result = CliRunner().invoke(LazyGroup(lazy={}, commands={"fails": fails}), ["fails"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: out of memory")
    assert result.output.count("\n") == 1


def test_a_fault_of_ours_is_not_hidden():
    @click.command()
    def fails() -> None:
        raise AssertionError("broken invariant")

    result = CliRunner().invoke(LazyGroup(lazy={}, commands={"fails": fails}), ["fails"])
    assert isinstance(result.exception, AssertionError)


def test_ctrl_c_is_one_word_and_the_shells_exit_code():
    @click.command()
    def waits() -> None:
        raise KeyboardInterrupt

    result = CliRunner().invoke(LazyGroup(lazy={}, commands={"waits": waits}), ["waits"])
    assert (result.exit_code, result.output) == (130, "Interrupted\n")


@pytest.mark.parametrize("how", ["version", "--version"])
def test_version_is_the_packages(how):
    assert CliRunner().invoke(cli, [how]).output.strip() == importlib.metadata.version("lockstep-llm")


SAY = """
import os, sys, click, clients.cli
def say() -> None:
    numbers = [os.open(os.devnull, os.O_RDONLY), *(stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr))]
    assert numbers[0] > 2 and numbers[1:] == [0, 1, 2], numbers
    assert sys.stdin.read() == ""
    click.echo("\u00e9\u4f60")
clients.cli.cli.add_command(click.Command("say", callback=say))
sys.argv[1:] = ["say"]
clients.cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["", "<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_gives_its_number_to_no_file(closed):
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", SAY]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\u00e9\u4f60\n"), ("latin-1", "\u00e9?\n")])
def test_what_the_terminal_has_no_character_for_is_a_question_mark(encoding, shown):
    result = subprocess.run(
        [sys.executable, "-c", SAY],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        env={"PYTHONIOENCODING": encoding},
    )
    assert result.stdout == shown.encode(encoding)
