"""The `lockstep` command. A subcommand's module is imported when that subcommand runs, so that `--help` is instant."""

import errno
import importlib
import importlib.metadata
import io
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from clients.errors import ClientError
from engine.errors import LockstepError


class Lazy(NamedTuple):
    """Where a subcommand is (`module:attribute`), and the line `--help` shows without importing it."""

    where: str
    summary: str


class LazyGroup(click.Group):
    """A group that imports a subcommand only to run it, and turns expected errors into one line and exit code 1."""

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all subcommands, sorted."""
        return sorted([*super().list_commands(ctx), *self._lazy])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported now if it is a lazy one; None for an unknown name."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self._lazy[cmd_name].where.split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing the lazy ones."""
        rows = []
        for name in self.list_commands(ctx):
            if name in self._lazy:
                rows.append((name, self._lazy[name].summary))
            elif command := super().get_command(ctx, name):
                rows.append((name, command.get_short_help_str()))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. Raises `click.ClickException` for whatever was refused on purpose or by the system.

        Ctrl-C ends the program as it does others: with 128 + SIGINT.
        """
        try:
            return super().invoke(ctx)
        except (ClientError, LockstepError) as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise click.ClickException(str(error)) from error
        except MemoryError as error:
            raise click.ClickException(
                "out of memory: the system, or a limit such as ulimit -v, gives no more"
            ) from error
        except KeyboardInterrupt:
            click.echo("Interrupted", err=True)
            raise SystemExit(128 + signal.SIGINT) from None


@click.group(
    cls=LazyGroup,
    lazy={
        "serve": Lazy("clients.serve:command", "Serve a model to many clients at once."),
        "pull": Lazy("clients.pull:command", "Fetch a known model file."),
        "chat": Lazy("clients.chat:command", "Talk with a running server."),
        "generate": Lazy("clients.generate:command", "Complete one prompt in this process, without a server."),
        "verify": Lazy("clients.verify:command", "Verify on this machine that answers are exact."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="lockstep-llm", message="%(version)s")
def cli() -> None:
    """Lockstep: an LLM inference server whose every answer is bit for bit the one it would have been alone."""


@cli.group(
    cls=LazyGroup,
    lazy={
        "serve": Lazy("clients.bench:command", "Load a running server and print latencies and throughput."),
        "engine": Lazy("clients.bench_engine:command", "Measure the model alone, beside this machine's limits."),
    },
)
def bench() -> None:
    """Measure how fast it is."""


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(importlib.metadata.version("lockstep-llm"))


def _open_standard_streams() -> None:
    """Have all three, and a stdout that takes whatever a model says, with ? for what its encoding lacks."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            # Whoever started us has closed it. The next file or socket would get its number, and our output.
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number
            setattr(sys, name, os.fdopen(opened, mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Run the `lockstep` command and exit."""
    _open_standard_streams()
    cli(prog_name="lockstep")


if __name__ == "__main__":
    main()
