"""Measure the cost of strikes, from a run's tape, its summary and `chaos.jsonl`.

The tape may still be being written.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.chaos.schedule import OF_NETWORK
from diloco_jax.faults import COORDINATOR
from diloco_jax.observability.failures import LostTokens
from diloco_jax.observability.history import read_history
from diloco_jax.observability.tape import read_lines, read_tape

Line = Mapping[str, Any]
LOST = ("absent", "left")
BACK = ("joined", "resumed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrikeOutcome:
    """Effect of one strike on one of those that it struck. Times are seconds from its
    beginning; None: it did not happen before the next strike there or on the
    coordinator, or the end."""

    who: str
    kind: str
    time: float
    """Unix seconds of its beginning."""
    seconds: float
    detected_s: float | None
    """Until the coordinator noted that the island is absent or ended. None if it was
    merged again before that. The coordinator has no such note."""
    back_s: float | None
    """Until the island joined or resumed, or the coordinator had recovered. None for an
    island that was heard again on its old connection."""
    merged_s: float | None
    """Until a merge that has the island, after the strike or its return; for the
    coordinator, until its first merge."""
    tokens_lost: int
    """Tokens of the ended incarnation that no merge has, as the ledger counts them."""


def outcomes(workdir: Path, islands: Iterable[str]) -> list[StrikeOutcome]:
    """Return an outcome for each strike and name; strikes that met no process are left
    out. Empty if nothing was struck."""
    try:
        struck = list(read_lines(workdir / run_files.CHAOS))
    except FileNotFoundError:
        return []
    return measured(struck, list(read_tape(workdir / run_files.TAPE)), list(islands))


def measured(
    struck: Sequence[Line],
    tape: Sequence[Line],
    islands: Sequence[str],
    before: LostTokens | None = None,
) -> list[StrikeOutcome]:
    """Return the outcomes. struck: lines of `chaos.jsonl`, in order. before: what the
    lines before those of `tape` came to."""
    met: list[tuple[Line, str]] = []
    for strike in struck:
        names: list[str] = list(strike["who"])
        if strike["kind"] in OF_NETWORK and COORDINATOR in names:
            names = list(islands)  # It struck all links.
        met += [(strike, name) for name in names if name not in strike["missed"]]
    found, lost = [], copy.deepcopy(before) or LostTokens()
    lost_with = {id(line): lost.take(line) for line in tape}
    for strike, name in met:
        until = min(
            (
                later["time"]
                for later, of in met
                if later["time"] > strike["time"] and of in (name, COORDINATOR)
            ),
            default=math.inf,
        )
        window = [r for r in tape if strike["time"] < r["time"] < until]
        if name not in islands:
            found.append(_of_coordinator(strike, name, window))
        else:
            found.append(_of_island(strike, name, window, lost_with))
    return found


def longest_gaps(summary: Line) -> dict[str, float]:
    """Return each island's longest time between two steps, in its median steps."""
    return {
        name: island["max_step_gap_seconds"] / island["median_step_seconds"]
        for name, island in summary.get("islands", {}).items()
        if island["median_step_seconds"]
    }


def rows(found: Sequence[StrikeOutcome]) -> list[tuple[str, ...]]:
    """Return a head and a row for each kind and name: number, medians and worsts."""
    out: list[tuple[str, ...]] = [
        ("kind", "who", "strikes", "detected s", "back s", "merged s", "lost tokens")
    ]
    for kind, who in sorted({(o.kind, o.who) for o in found}):
        of = [o for o in found if (o.kind, o.who) == (kind, who)]
        times = zip(*((o.detected_s, o.back_s, o.merged_s) for o in of), strict=True)
        lost = str(sum(o.tokens_lost for o in of))
        out.append((kind, who, str(len(of)), *map(_middle, times), lost))
    return out


def write_plot(found: Sequence[StrikeOutcome], workdir: Path, path: Path) -> None:
    """Plot the run's timeline, with a mark where each strike began."""
    history = read_history(workdir)
    began = next((r["time"] for r in read_tape(workdir / run_files.TAPE)), 0.0)
    made = (*history.steps["time"], *history.merges["time"])
    end = max(1.0, *made, *(o.time - began for o in found))
    axes = history.plot_timeline(end=float(end))
    lanes = {COORDINATOR: 0} | {name: n for n, name in enumerate(history.islands, 1)}
    for o in (o for o in found if o.who in lanes):
        axes.plot(o.time - began, lanes[o.who] - 0.42, "v", color="red", ms=7)
        axes.text(o.time - began, lanes[o.who] - 0.5, o.kind, fontsize=6)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(path, dpi=100)


def _of_island(
    strike: Line, name: str, window: Sequence[Line], lost_with: Mapping[int, int]
) -> StrikeOutcome:
    """Return the outcome for an island. lost_with: tokens by a line's `id`."""
    over = strike["time"] + strike["seconds"]
    killed = strike["kind"] == "kill"
    own = [r for r in window if r.get("island") == name]
    lost = _first(own, lambda r: r["kind"] in LOST)
    again = _first(window, lambda r: r["time"] > over and _has(r, name, None))
    back = ended = None
    if lost and not killed and again and again["time"] <= lost["time"]:
        lost = None  # It was merged again, and nobody had noticed.
    elif lost or killed:
        # A killed island may be back before anyone has noticed.
        since = lost["time"] if lost else over
        back = _first(own, lambda r: r["kind"] in BACK and r["time"] >= since)
        after = until = back["time"] if back else math.inf
        if not (back or killed) and lost and lost["kind"] == "absent":
            # It was heard again on the connection that it had, of which no line tells.
            after, until = lost["time"], -math.inf
        after = max(over, after)
        again = _first(window, lambda r: r["time"] > after and _has(r, name, back))
        ended = _first(own, lambda r: r["kind"] == "left" and r["time"] <= until)
    tokens = lost_with.get(id(ended), 0)
    return _outcome(strike, name, _since(strike, lost), back, again, tokens)


def _of_coordinator(strike: Line, name: str, window: Sequence[Line]) -> StrikeOutcome:
    """Return the outcome for a coordinator or a worker, which end together."""
    over, again = strike["time"] + strike["seconds"], None
    if strike["kind"] == "kill":
        back = _first(window, lambda r: r["kind"] == "recovered")
    else:
        back = _first(window, lambda r: r["time"] >= over)
    if back:
        since = back["time"]
        again = _first(
            window,
            lambda r: r["kind"] == "merged" and over < r["time"] and since <= r["time"],
        )
    return _outcome(strike, name, None, back, again)


def _outcome(
    strike: Line,
    who: str,
    detected_s: float | None,
    back: Line | None,
    again: Line | None,
    tokens_lost: int = 0,
) -> StrikeOutcome:
    return StrikeOutcome(
        who=who,
        kind=strike["kind"],
        time=strike["time"],
        seconds=strike["seconds"],
        detected_s=detected_s,
        back_s=_since(strike, back),
        merged_s=_since(strike, again),
        tokens_lost=tokens_lost,
    )


def _first(records: Sequence[Line], holds: Callable[[Line], bool]) -> Line | None:
    return next((record for record in records if holds(record)), None)


def _has(record: Line, name: str, back: Line | None) -> bool:
    """Whether a merge has a delta of the island, from its new life if it has one."""
    least = back["incarnation"] if back else 0
    return record["kind"] == "merged" and any(
        part["island"] == name and part["incarnation"] >= least
        for part in record["contributions"]
    )


def _since(strike: Line, record: Line | None) -> float | None:
    return None if record is None else float(record["time"] - strike["time"])


def _middle(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    missing = f", {len(values) - len(known)} not" if len(known) < len(values) else ""
    return f"{statistics.median(known):.1f} (worst {max(known):.1f}{missing})"
