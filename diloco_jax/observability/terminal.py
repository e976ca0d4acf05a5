"""The live view of a run: one row per island, and the progress of the run.

Everything is drawn from the coordinator's status alone. On a terminal the table stays
in place; elsewhere a line is written now and then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_jax.observability.health import STYLES, health_of, health_text

LINE_EVERY_S = 10.0
ALERTS_SHOWN = 3
STATE_STYLES = {
    "training": "green",
    "compiling": "cyan",
    "joining": "cyan",
    "starting": "cyan",
    "stopped": "dim",
    "restarting": "yellow",
    "absent": "yellow",
    "quarantined": "red",
    "refused": "red",
    "failed": "red",
}


def render(status: Mapping[str, Any], seconds_left: float | None) -> RenderableType:
    """Return the live view: health, table of islands, progress bar, latest alerts."""
    health = health_of(status)
    glance = Text(health_text(health), style=STYLES.get(health["state"], ""))
    # A bare bar fills the width without a line end, and the text after it is cut off.
    bar = Padding(ProgressBar(total=1.0, completed=_number(status, "progress")), 0)
    headline = Text(_headline(status, seconds_left))
    alerts = [
        Text(f"! {text}", style="yellow")
        for text in status.get("alerts", [])[-ALERTS_SHOWN:]
    ]
    workers = [Text(_worker(w), style="dim") for w in status.get("workers", ())]
    below = (_bandwidth(status), *workers, *alerts)
    return Group(glance, island_table(status), bar, headline, *below)


def island_table(status: Mapping[str, Any]) -> Table:
    """Return a table with one row per island."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("island", no_wrap=True)
    table.add_column("state", no_wrap=True)
    islands = status.get("islands", {})
    # Eighty columns have room for the evaluation loss only where an island evaluates.
    evaluated = any(_loss(i, "eval_loss") != "-" for i in islands.values())
    losses = ("loss", "eval") if evaluated else ("loss",)
    for name in ("step", "tok/s", *losses, "part.", "version", "up", "down"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, island in islands.items():
        state = str(island.get("state", ""))
        attempt = island.get("incarnation", 1)
        table.add_row(
            name,
            Text(
                f"{state} #{attempt}" if attempt > 1 else state,
                style=STATE_STYLES.get(state, ""),
            ),
            f"{int(_number(island, 'steps')):,}",
            f"{_number(island, 'tokens_per_second'):,.0f}",
            _loss(island, "loss"),
            *([_loss(island, "eval_loss")] if evaluated else []),
            f"{_number(island, 'participation'):.0%}",
            str(island.get("version", "-")),
            bytes_text(_number(island, "bytes_up")),
            bytes_text(_number(island, "bytes_down")),
        )
    return table


def line(status: Mapping[str, Any], seconds_left: float | None) -> str:
    """Return the live view in one line, for logs and pipes."""
    islands = ", ".join(
        f"{name} {island.get('state', '')} {int(_number(island, 'steps')):,}"
        f" loss {_loss(island, 'loss')}"
        for name, island in status.get("islands", {}).items()
    )
    health = health_text(health_of(status))
    return f"{health} | {_headline(status, seconds_left)} | {islands}"


class Dashboard:
    """A context manager that shows each status it is given."""

    def __init__(self, console: Console):
        self._console = console
        self._live = Live(
            console=console, auto_refresh=False, transient=False, screen=False
        )
        self._began: tuple[float, float] | None = None
        self._next_line_s = 0.0
        self._told: list[str] = []

    def __enter__(self) -> Dashboard:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, status: Mapping[str, Any], now: float) -> None:
        """Draw the status; `now` is on any clock of seconds."""
        left = self.seconds_left(_number(status, "progress"), now)
        if self._console.is_terminal:
            self._live.update(render(status, left), refresh=True)
        elif now >= self._next_line_s:
            self._next_line_s = now + LINE_EVERY_S
            alerts = status.get("alerts", [])[-ALERTS_SHOWN:]
            new = [f"! {text}" for text in alerts if text not in self._told]
            self._told = alerts
            for text in (line(status, left), *new):
                self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def seconds_left(self, progress: float, now: float) -> float | None:
        """Return the seconds left at the mean speed since the first progress; None
        before any progress."""
        if self._began is None:
            if progress > 0:
                self._began = (now, progress)
            return None
        began, at = self._began
        if progress <= at:
            return None
        return max(0.0, 1 - progress) * (now - began) / (progress - at)


def bytes_text(count: float) -> str:
    """Format bytes as `12.3 MB`, in decimal units like bandwidths."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration_text(seconds: float) -> str:
    """Format a duration as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _headline(status: Mapping[str, Any], seconds_left: float | None) -> str:
    left = "" if seconds_left is None else f" | {duration_text(seconds_left)} left"
    return (
        f"{status.get('phase', 'starting')} {_number(status, 'progress'):.0%} of "
        f"{int(_number(status, 'total_tokens')):,} tokens"
        f" | {int(_number(status, 'merges')):,} merges"
        f" | goodput {_number(status, 'goodput'):.2f}{_merged(status)}{left}"
    )


def _merged(status: Mapping[str, Any]) -> str:
    """Return the newest loss of the merged model, if islands watch it."""
    if (model := status.get("merged_model")) is None:
        return ""
    return f" | merged {_loss(model, 'eval_loss')} at cycle {model['cycle']:,}"


def _worker(worker: Mapping[str, Any]) -> str:
    return (
        f"worker {worker['worker']}: {worker['address'] or 'away'}, "
        f"{worker['fragments']} fragments, {bytes_text(worker['memory_bytes'])}"
    )


def _bandwidth(status: Mapping[str, Any]) -> Text:
    up, down = (_number(status, f"bytes_{way}_per_second") for way in ("up", "down"))
    return Text(f"{bytes_text(up)}/s up, {bytes_text(down)}/s down", style="dim")


def _number(values: Mapping[str, Any], name: str) -> float:
    """Return a number of the status; 0 if unknown (NaN travels as null in JSON)."""
    value = values.get(name)
    return float(value) if value is not None and math.isfinite(value) else 0.0


def _loss(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"
