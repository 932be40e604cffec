"""How far a long piece of work is: a bar on a terminal, one line elsewhere. On stderr: stdout is for results."""

import contextlib
from collections.abc import Callable, Iterator

import click

Advance = Callable[[int], None]
"""Called with how much has just been done."""


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Show how much of `total` is done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        click.echo(title, err=True)
        yield lambda _: None
        return
    with Progress(console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)
