"""Progress of a simulation: a bar; and then a table or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.table import Table

from diloco_jax.observability.terminal import bar as progress_bar

Progress = Callable[[float], None]
Columns = Mapping[str, Callable[[Any], str]]
"""Header of each column, and the text of a row's cell."""


def nobody(share: float) -> None:
    """Ignore the progress."""


def part(progress: Progress, index: int, parts: int) -> Progress:
    """Return the progress of part `index`, from 0, of `parts` equal parts."""
    return lambda share: progress((index + share) / parts)


def bar(title: str) -> AbstractContextManager[Progress]:
    """Show how far a simulation is, on standard error."""
    return progress_bar(Console(stderr=True), title)


def show(as_json: bool, values: dict[str, Any], text: Table | str) -> None:
    """Print the values as JSON to standard output, or the text for people."""
    if as_json:
        print(json.dumps(values))
    else:
        tell(text)


def tell(text: Table | str) -> None:
    """Print to standard error."""
    console = Console(stderr=True, markup=False)
    console.print(text, highlight=False, soft_wrap=True)


def table(columns: Columns, rows: Iterable[Any]) -> Table:
    """Return the rows as a table; all columns but the first hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        made.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(text(row) for text in columns.values()))
    return made


def or_dash(value: float | None, form: str) -> str:
    """Return the formatted value, or a dash for None."""
    return "-" if value is None else format(value, form)
