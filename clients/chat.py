"""`lockstep chat`: a conversation with a running server. Ctrl-C ends the answer, Ctrl-D the program."""

import asyncio
import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

import click

from clients.api import DEFAULT_URL, LockstepClient
from clients.errors import ClientError

_UNPRINTABLE = dict.fromkeys(c for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t")
"""Control characters: a model must not be able to drive the terminal."""

Write = Callable[[str], None]


async def stream_answer(client: LockstepClient, messages: list[dict[str, str]], write: Write, **fields: Any) -> None:
    """Write the text of the answer to `messages` as it comes. Raises `ClientError`."""
    async with contextlib.aclosing(client.stream_chat(messages, **fields)) as chunks:
        async for chunk in chunks:
            for choice in chunk.get("choices", ()):
                if text := choice["delta"].get("content"):
                    write(text)


def converse(runner: asyncio.Runner, client: LockstepClient, system: str | None, **fields: Any) -> None:
    """Read lines from the terminal and answer each, with all that was said before, until the input ends."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        answer: list[str] = []

        def write(text: str, answer: list[str] = answer) -> None:
            answer.append(text)
            click.echo(text.translate(_UNPRINTABLE), nl=False)
            sys.stdout.flush()

        try:
            runner.run(stream_answer(client, messages, write, **fields))
            click.echo()
        except KeyboardInterrupt:
            click.secho(" [stopped]", dim=True)
        except ClientError as error:
            click.echo(f"Error: {error}", err=True)
        if answer:
            messages.append({"role": "assistant", "content": "".join(answer)})
        else:
            messages.pop()


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
            served = runner.run(client.default_model())
            converse(runner, client, system, model=model or served, **given)
        finally:
            runner.run(client.__aexit__(None, None, None))
