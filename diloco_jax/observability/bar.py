"""Progress of one piece of work whose share is known, with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

from diloco_jax.observability.terminal import LINE_EVERY_S, duration_text

_shown: list[progress.Progress] = []
"""The bar that is shown now: a terminal has room for one."""


@contextmanager
def bar(console: Console, doing: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal, and remove it at the end; elsewhere a line of text now
    and then. Yields a function to call with the share that is done.

    A bar that is shown within another one stands below it."""
    if not console.is_terminal:
        yield lines(console, doing)
        return
    if _shown:
        outer = _shown[0]
        inner = outer.add_task(doing, total=1.0)
        try:
            yield lambda share: outer.update(inner, completed=share)
        finally:
            outer.remove_task(inner)
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(doing, total=1.0)
        _shown.append(shown)
        try:
            yield lambda share: shown.update(task, completed=share)
        finally:
            _shown.remove(shown)


def lines(console: Console, doing: str) -> Callable[[float], None]:
    """Return a function to call with the share that is done, which writes a line of
    text every `LINE_EVERY_S` seconds at most."""
    began = time.monotonic()
    told = began

    def report(share: float) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < LINE_EVERY_S or not 0 < share < 1:
            return
        told = now
        left = duration_text((now - began) * (1 - share) / share)
        text = f"{doing}: {share:.0%}, {left} left"
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    return report
