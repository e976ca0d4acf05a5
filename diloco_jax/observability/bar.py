"""A progress bar for one piece of work whose share is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console


@contextmanager
def bar(console: Console, doing: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal, and remove it at the end. Yields the function that is
    told the share that is done."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    with progress.Progress(
        *columns, console=console, transient=True, disable=hidden
    ) as shown:
        task = shown.add_task(doing, total=1.0)
        yield lambda share: shown.update(task, completed=share)
