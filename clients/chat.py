"""`lockstep chat`: a conversation with a running server. Ctrl-C ends the answer, Ctrl-D the program."""

import asyncio
import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from clients.api import DEFAULT_URL, LockstepClient
from clients.errors import ClientError, ServerError

_UNPRINTABLE = dict.fromkeys(c for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t")
"""Control characters: a model must not be able to drive the terminal."""

CONTEXT_IS_FULL = "context_length_exceeded"
COMMANDS = "/clear forgets what was said, /help shows this, Ctrl-C stops an answer, Ctrl-D ends."
NOTES = {"length": "[cut at the length limit]", "abort": "[ended by the server]"}
"""What is said of an answer that did not end of itself, by its finish_reason."""

_COMMAND = re.compile(r"/[a-z]+")

Write = Callable[[str], None]


async def stream_answer(
    client: LockstepClient, messages: Sequence[Mapping[str, str]], write: Write, **fields: Any
) -> str | None:
    """Write the text of the answer to `messages` as it comes: its finish_reason. Raises `ClientError`."""
    finish_reason = None
    async with contextlib.aclosing(client.stream_chat(messages, **fields)) as chunks:
        async for chunk in chunks:
            for choice in chunk.get("choices", ()):
                if text := choice["delta"].get("content"):
                    write(text)
                finish_reason = choice.get("finish_reason") or finish_reason
    return finish_reason


def converse(runner: asyncio.Runner, client: LockstepClient, system: str | None, **fields: Any) -> bool:
    """Read lines and answer each, with all that was said before, until the input ends: whether every one was."""
    beginning = [{"role": "system", "content": system}] if system is not None else []
    turns: list[dict[str, str]] = []
    is_all_answered = True
    while (line := _read_line()) is not None:
        command = line.strip()
        if not command:
            continue
        if command == "/clear":
            turns.clear()
        elif _COMMAND.fullmatch(command):
            _note(COMMANDS if command == "/help" else f"no command {command}: {COMMANDS}")
        else:
            turns.append({"role": "user", "content": line})
            try:
                answer = _answer(runner, client, beginning, turns, **fields)
            except ClientError as error:
                click.echo(f"Error: {error}", err=True)
                is_all_answered = False
                answer = ""
            if answer:
                turns.append({"role": "assistant", "content": answer})
            else:
                turns.pop()
    return is_all_answered


def _answer(
    runner: asyncio.Runner,
    client: LockstepClient,
    beginning: list[dict[str, str]],
    turns: list[dict[str, str]],
    **fields: Any,
) -> str:
    """The answer to the last of `turns`, as far as it came; the oldest are dropped as far as the context asks for it.

    Raises `ClientError`.
    """
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        click.echo(text.translate(_UNPRINTABLE), nl=False)
        sys.stdout.flush()

    is_dropping = False
    while True:
        try:
            reason = runner.run(stream_answer(client, [*beginning, *turns], write, **fields))
        except KeyboardInterrupt:
            ending = "[stopped]"
        except ServerError as error:
            if error.code != CONTEXT_IS_FULL or len(turns) == 1:
                raise
            if not is_dropping:
                _note("[the context is full: the oldest turns are forgotten]")
                is_dropping = True
            del turns[: min(2, len(turns) - 1)]
            continue
        else:
            ending = NOTES.get(reason or "", "")
        click.echo()
        if ending:
            _note(ending)
        return "".join(pieces)


def _note(text: str) -> None:
    """Say something of our own. On stderr: stdout is for answers."""
    click.secho(text, dim=True, err=True)


def _read_line() -> str | None:
    """The next line typed, "" if Ctrl-C threw it away, None at the end of the input."""
    is_terminal = sys.stdin.isatty()
    try:
        return input("> " if is_terminal else "")
    except KeyboardInterrupt:
        click.echo()
        return ""
    except EOFError:
        if is_terminal:
            click.echo()
        return None


@click.command("chat")
@click.option("--url", default=DEFAULT_URL, envvar="LOCKSTEP_URL", show_default=True, help="Address of the server.")
@click.option("--api-key", envvar="LOCKSTEP_API_KEY", help="Key the server asks for.")
@click.option("--model", help="Name of the model.  [default: the server's first]")
@click.option("--system", help="System message to begin with.")
@click.option("--temperature", type=float, help="0 always takes the likeliest token.  [default: the server's]")
@click.option("--seed", type=int, help="Makes sampled answers repeatable.")
@click.option("--max-tokens", type=int, help="Length of an answer at most.  [default: up to the context]")
def command(url: str, api_key: str | None, model: str | None, system: str | None, **fields: Any) -> None:
    """Talk with a running server. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing and history
    given = {name: value for name, value in fields.items() if value is not None}
    client = LockstepClient(url, api_key)
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())
        try:
            served = runner.run(client.models())
            name = model or runner.run(client.default_model())
            if name not in served:  # which a server may accept all the same
                _note(f"{name} is not among the models of {client.base_url}: {', '.join(served)}")
            is_terminal = sys.stdin.isatty()
            if is_terminal:
                _note(f"{name} at {client.base_url}. {COMMANDS}")
            is_all_answered = converse(runner, client, system, model=name, **given)
        finally:
            runner.run(client.__aexit__(None, None, None))
    if not is_all_answered and not is_terminal:
        raise SystemExit(1)
