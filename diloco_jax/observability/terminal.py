"""Show a run on a terminal: its live view, progress bars, and the closing report.

The view, one row per island and the progress of the run, is drawn from the
coordinator's status alone. On a terminal the table stays in place; elsewhere a line is
written now and then. The report is for newcomers, from the run's summary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import progress
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco_jax.faults import COORDINATOR, Faults
from diloco_jax.observability.measures import EVALUATING, STYLES, health_of, health_text

LINE_EVERY_S = 10.0
ALERTS_SHOWN = 3
STATE_STYLES = {
    "training": "green",
    "stopped": "dim",
    **dict.fromkeys(("compiling", "joining", "starting"), "cyan"),
    **dict.fromkeys(("restarting", "absent"), "yellow"),
    **dict.fromkeys(("quarantined", "refused", "failed"), "red"),
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
    workers = [
        Text(
            f"worker {worker['worker']}: {worker['address'] or 'away'}, "
            f"{worker['fragments']} fragments, {bytes_text(worker['memory_bytes'])}",
            style="dim",
        )
        for worker in status.get("workers", ())
    ]
    starts = [Text(text, style="dim") for text in _starts(status)]
    up, down = (_number(status, f"bytes_{way}_per_second") for way in ("up", "down"))
    wire = Text(f"{bytes_text(up)}/s up, {bytes_text(down)}/s down", style="dim")
    below = (*starts, wire, *workers, *alerts)
    return Group(glance, island_table(status), bar, headline, *below)


def island_table(status: Mapping[str, Any]) -> Table:
    """Return a table with one row per island."""
    islands = status.get("islands", {})
    # Eighty columns have room for the evaluation loss only where an island evaluates.
    evaluated = any(_loss(i, "eval_loss") != "-" for i in islands.values())
    losses = {"loss": "loss", **({"eval": "eval_loss"} if evaluated else {})}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("island", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "tok/s", *losses, "part.", "version", "up", "down"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, island in islands.items():
        state, attempt = str(island.get("state", "")), island.get("incarnation", 1)
        shown = f"{state} #{attempt}" if attempt > 1 else state
        table.add_row(
            name,
            Text(shown, style=STATE_STYLES.get(state, "")),
            f"{int(_number(island, 'steps')):,}",
            f"{_number(island, 'tokens_per_second'):,.0f}",
            *(_loss(island, field) for field in losses.values()),
            f"{_number(island, 'participation'):.0%}",
            str(island.get("version", "-")),
            *(bytes_text(_number(island, f"bytes_{way}")) for way in ("up", "down")),
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
    parts = (health, _headline(status, seconds_left), islands, *_starts(status))
    return " | ".join(parts)


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
                say(self._console, text)

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


def say(console: Console, text: str) -> None:
    """Print a text as it is, however long its lines are."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


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
    merged = ""  # The newest loss of the merged model, if islands watch it.
    if (model := status.get("merged_model")) is not None:
        merged = f" | merged {_loss(model, 'eval_loss')} at cycle {model['cycle']:,}"
    return (
        f"{status.get('phase', 'starting')} {_number(status, 'progress'):.0%} of "
        f"{int(_number(status, 'total_tokens')):,} tokens"
        f" | {int(_number(status, 'merges')):,} merges"
        f" | goodput {_number(status, 'goodput'):.2f}{merged}{left}"
    )


def _starts(status: Mapping[str, Any]) -> list[str]:
    """Return what is left of the start of islands that do not train yet."""
    return [
        f"island {name}: {programs:.0f} programs left to compile or read, "
        f"{fragments:.0f} fragments to fetch"
        for name, island in status.get("islands", {}).items()
        if (programs := _number(island, "programs_left"))
        + (fragments := _number(island, "fragments_left"))
    ]


def _number(values: Mapping[str, Any], name: str) -> float:
    """Return a number of the status; 0 if unknown (NaN travels as null in JSON)."""
    value = values.get(name)
    return float(value) if value is not None and math.isfinite(value) else 0.0


def _loss(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


_shown: list[progress.Progress] = []
"""The bar that is shown now: a terminal has room for one."""


@contextmanager
def bar(console: Console, doing: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal, and remove it at the end; elsewhere a line of text now
    and then. Yields a function to call with the share that is done.

    A bar that is shown within another one stands below it."""
    if not console.is_terminal:
        yield progress_lines(console, doing)
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


def progress_lines(console: Console, doing: str) -> Callable[[float], None]:
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
        say(console, f"{doing}: {share:.0%}, {left} left")

    return report


NO_FAULTS = Faults()
FAILURES_SHOWN = 10
COSTS = {
    "tokens_lost": "tokens lost",
    "tokens_not_computed": "tokens not computed",
    "merges_without": "merges without it",
}
"""What a failure cost, by its field of `summary.json`."""


def closing_report(summary: Mapping[str, Any], faults: Faults = NO_FAULTS) -> str:
    """Return the report as lines of plain text. faults: what was to strike."""
    islands: Mapping[str, Mapping[str, Any]] = summary.get("islands", {})
    width = _width(islands)
    lines = [
        _result(summary),
        f"goodput {summary.get('goodput', 0):.3f}, uptime "
        f"{summary.get('uptime', 0):.1%}, {summary.get('merges', 0):,} merges in "
        f"{duration_text(summary.get('wall_seconds', 0))}; "
        f"{bytes_text(summary.get('bytes_up', 0))} up, "
        f"{bytes_text(summary.get('bytes_down', 0))} down, "
        f"{bytes_text(summary.get('bytes_join', 0))} for joins",
        "",
        f"{'tokens':<{width}} {'computed':>11} {'merged':>11} {'lost':>11} "
        f"{'in flight':>11}  {'share of merged':>15}",
    ]
    total = max(1, summary.get("tokens_merged", 0))
    for name, island in [*islands.items(), ("total", summary)]:
        merged = island.get("tokens_merged", 0)
        lines.append(
            f"{name:<{width}} {island.get('tokens_computed', 0):>11,} {merged:>11,} "
            f"{_lost(island):>11,} {island.get('tokens_in_flight', 0):>11,}"
            f"  {merged / total:>15.1%}"
        )
    failed = list(_failure_lines(summary.get("failures", ())))
    cost = list(_outage_lines(summary, islands))
    skipped = [
        f"{name}: {island['skipped_steps']:,} of {island.get('steps', 0):,} steps had "
        f"a loss or gradient that is not finite, and changed nothing"
        for name, island in islands.items()
        if island.get("skipped_steps")
    ]
    alerts = [f"alert: {text}" for text in summary.get("alerts", ())]
    for part in (alerts, skipped, failed, cost, list(_never_struck(summary, faults))):
        lines += ["", *part] if part else []
    return "\n".join(lines)


def _never_struck(summary: Mapping[str, Any], faults: Faults) -> Iterator[str]:
    """Describe the faults that cannot have struck, by what the summary counts."""
    for fault in faults.faults:
        if (island := summary.get("islands", {}).get(fault.who)) is None:
            made, unit, lives = summary.get("merges", 0), "merges", fault.incarnation
        else:
            made, unit, lives = island.get("steps", 0), "steps", island.get("joins", 1)
        came = lives >= fault.incarnation
        # One that was killed before its last report is in the run once more.
        if not came or (made < fault.step and lives == fault.incarnation):
            joined = "" if came else f", and its joins were {lives}"
            text = f"the fault {fault.text} never struck: {fault.who} made {made:,} "
            yield f"{text}{unit}{joined}"


def comparison(summary: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """Return one sentence on the run and plain training on as many tokens."""
    ours, theirs = summary.get("eval_loss"), baseline.get("eval_loss")
    if ours is None or theirs is None:
        return "no comparison: a validation loss is missing, or not finite"
    return (
        f"plain data-parallel training on {baseline.get('tokens', 0):,} tokens "
        f"(learning rate {baseline.get('learning_rate', 0):g}): loss {theirs:.4f}; "
        f"this run {ours:.4f}, {ours / theirs - 1:+.1%}"
    )


def loss_line(found: Mapping[str, Any]) -> str:
    """Return the validation loss of `diloco eval` or of a summary as a text."""
    if found["eval_loss"] is None:
        return "validation loss not finite: the parameters have diverged"
    bits = found.get("eval_bits_per_byte")
    per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
    sources = found.get("eval_loss_by_source") or {}
    parts = (f"{name} {loss:.4f}" for name, loss in sources.items() if loss is not None)
    by_source = f" ({', '.join(parts)})" if sources else ""
    return (
        f"validation loss {found['eval_loss']:.4f} nats per token{per_byte}{by_source}"
    )


def _result(summary: Mapping[str, Any]) -> str:
    if "eval_loss" not in summary:
        if summary.get("phase") == EVALUATING:
            return "over, and being evaluated"
        stopped = summary.get("phase") == "stopped"
        return f"{'stopped before its end, ' if stopped else ''}not evaluated"
    return loss_line(summary)


def _failure_lines(failures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tell the newest failures: who, when, for how long, why, and what it cost."""
    if (earlier := len(failures) - FAILURES_SHOWN) > 0:
        yield f"{earlier:,} failures before these"
    for one in failures[-FAILURES_SHOWN:]:
        costs = [
            f"{one[field]:,} {what}" for field, what in COSTS.items() if one[field]
        ]
        if (again := one["merged_after_seconds"]) is not None:
            goes_on = one["who"] == COORDINATOR
            what = "merges went on" if goes_on else "merged again"
            costs.append(f"{what} {again:.1f} s after it began")
        lasts = one["seconds"]
        yield "; ".join(
            [
                f"{duration_text(one['at_seconds'])} {one['who']} failed "
                f"{'to the end' if lasts is None else f'for {lasts:.1f} s'}: "
                f"{one['why']}",
                *([", ".join(costs)] if costs else []),
            ]
        )


def _outage_lines(
    summary: Mapping[str, Any], islands: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Describe what stops of the whole run cost, and outages the other islands."""
    stopped = summary.get("phase") == "stopped"
    if of_stops := sum(_of_stops(i, stopped=stopped) for i in islands.values()):
        yield f"stopping the run as a whole cost {of_stops:,} tokens"
    victims = {one["who"] for one in summary.get("failures", ())}
    others = [name for name in islands if name not in victims]
    if victims and others:
        yield "the others' longest gap between two steps:"
    for name in others if victims else ():
        median = islands[name].get("median_step_seconds", 0)
        gap = islands[name].get("max_step_gap_seconds", 0)
        ratio = f" = {gap / median:.1f} medians of {median:.3f} s" if median else ""
        yield f"  {name:<{_width(islands)}} {gap:.3f} s{ratio}"


def _width(islands: Mapping[str, Any]) -> int:
    """Return the width of a column of islands' names."""
    return max([8, *map(len, islands)])


def _of_stops(island: Mapping[str, Any], *, stopped: bool) -> int:
    """Return the tokens that an island lost because the whole run was stopped, now or
    earlier. An island that is asked to end alone loses tokens for the same reason."""
    if not stopped and not island.get("resumed"):
        return 0
    return int(island.get("tokens_lost", {}).get("stopped", 0))


def _lost(tokens: Mapping[str, Any]) -> int:
    return int(sum(tokens.get("tokens_lost", {}).values()))
