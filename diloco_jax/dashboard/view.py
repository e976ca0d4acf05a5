"""Aggregate a window of time to the pixels of the page.

Bounded whatever the run: lanes have one character a column, curves a few hundred
points. Shapes: `S` states, `R` rows (the coordinator, then islands), `C` columns.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from diloco_jax.dashboard.timeline import (
    COORDINATOR,
    COSINES,
    MACHINE,
    STATES,
    Array,
    Lane,
    Timeline,
    count_of,
)

T = TypeVar("T")

LETTERS = "jctsqa"
"""Letter of each of `STATES` in a lane."""
STANDS_OUT = np.array([3.0, 3.0, 1.0, 1.0, 2.0, 10.0])
"""Weight of each state in the choice of a column's: short absences remain visible."""
LEAST_OF_A_COLUMN = 0.02
COLUMNS = (50, 720)
MANY_ISLANDS = 16
"""Beyond it, lanes and curves have fewer columns."""
COLUMNS_OF_MANY = 440
POINTS, POINTS_OF_MANY = 240, 120
FEWEST_POINTS, MERGES_OF_A_POINT = 24, 8
"""A point of a curve is of several merges, else their beat is all that one sees."""
OF_ISLANDS = (
    *("tokens", "merged_tokens", "bytes_up", "bytes_down", "training"),
    *(name for mean in ("loss", "eval_loss", "lag") for name in (mean, count_of(mean))),
)
OF_WINDOW = (
    *("lost_tokens", "merged_tokens", "merged_deltas", "merges"),
    *("bytes_up", "bytes_down", "tokens", "training"),
)
DIGITS = {
    **dict.fromkeys(COSINES, 3),
    **dict.fromkeys((*MACHINE, "workers_memory_bytes"), 0),
}
"""Digits after the point of the means on the coordinator's row."""
MERGES_SHOWN = 60
FAILURES_SHOWN = 300
FAILURE = (
    *("who", "began", "ended", "why", "lost_tokens", "idle_tokens", "without"),
    "merged",
)
FEW_TRAIN = 0.25
"""Share of all islands' seconds that are of training, below which MFU is left out."""
ALERTS_SHOWN = 20
MERGED_LOSSES_SHOWN = 240
RECENT, RECENT_S, RECENT_BINS = 0.25, 600.0, 4
"""Part of the run, and most seconds of it, whose speed says when it will be over. It
has some whole bins, which are longer in a run of weeks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A part of a run: unix times, and the width of the lanes in columns."""

    start: float
    stop: float
    columns: int


def view(
    timeline: Timeline,
    window: Window,
    flops_per_token: float | None = None,
    goodput: float | None = None,
) -> dict[str, Any]:
    """Return what the page draws of a window: JSON-compatible, NaN where it has
    nothing.

    Args:
      flops_per_token: None if it is not known, and with it MFU.
      goodput: of the run, if the window is all of it.
    """
    timeline.settle()
    lanes = sorted(timeline.lanes.values(), key=lambda lane: lane.name)
    many = len(lanes) > MANY_ISLANDS
    columns = int(np.clip(window.columns, *COLUMNS))
    columns = min(columns, COLUMNS_OF_MANY) if many else columns
    points = POINTS_OF_MANY if many else POINTS
    begin = timeline.grid.begin or 0.0
    return {
        "span": [begin, timeline.newest],
        "devices": sorted({lane.device for lane in lanes if lane.device}),
        "window": [window.start, window.stop],
        "columns": columns,
        "tokens_per_s": _recent_speed(timeline),
        "lanes": _lanes(
            timeline, [timeline.coordinator, *lanes], window, columns, flops_per_token
        ),
        "curves": _curves(timeline, lanes, window, points, flops_per_token),
        "failures": _failures(timeline, window),
        "goodput": _where_it_went(timeline, lanes, window, goodput),
        "merges": _merges(timeline, [lane.name for lane in lanes], window),
        "alerts": [
            [time, text] for time, text in timeline.alerts if time < window.stop
        ][-ALERTS_SHOWN:],
    }


def _recent_speed(timeline: Timeline) -> float:
    """Return the tokens that all islands have computed a second of late, whatever the
    window is. The bin that is under way is left out: its tokens are not all there."""
    begin, width_s = timeline.grid.begin or 0.0, timeline.grid.width_s
    whole = math.floor((timeline.newest - begin) / width_s) * width_s
    recent = max(min(RECENT_S, RECENT * whole), RECENT_BINS * width_s)
    seconds, stop = min(whole, recent), begin + whole
    tokens = timeline.grid.totals(("tokens",), stop - seconds, stop).sum()
    return float(tokens / seconds) if seconds > 0 else 0.0


def _lanes(
    timeline: Timeline,
    lanes: list[Lane],
    window: Window,
    columns: int,
    flops_per_token: float | None,
) -> list[dict[str, Any]]:
    rows = [lane.row for lane in lanes]
    at = (window.start, window.stop, columns)
    seconds = timeline.grid.columns(STATES, *at)[:, rows]
    found = timeline.grid.columns(("out", "adoptions", "merges"), *at)
    width = (window.stop - window.start) / columns
    out, marks, merges = found[:, rows]
    marks[0] = merges[0]
    best = np.argmax(seconds * STANDS_OUT[:, None, None], axis=0)
    nothing = seconds.sum(axis=0) < LEAST_OF_A_COLUMN * width
    codes = np.where(nothing, len(STATES), best)
    found = timeline.grid.totals(OF_WINDOW, window.start, window.stop)
    sums = dict(zip(OF_WINDOW, found, strict=True))
    shares = _mfu(sums["tokens"][rows], sums["training"][rows], lanes, flops_per_token)
    away = _away(timeline, window)
    return [
        {
            "name": lane.name,
            "incarnation": lane.incarnation,
            "device": lane.stands_for or lane.device,
            "states": _runs(codes[n]),
            "out": _levels(out[n] / width),
            "marks": _levels(np.minimum(marks[n], 1.0)),
            "away_s": round(away.get(lane.name, 0.0), 1),
            "lost_tokens": round(sums["lost_tokens"][lane.row]),
            "merged_tokens": round(
                sums["merged_tokens"][lane.row] / timeline.fragments
            ),
            "in_merges": round(sums["merged_deltas"][lane.row]),
            "merges_count": round(sums["merges"][lane.row]),
            "bytes_up": round(float(sums["bytes_up"][lane.row])),
            "bytes_down": round(float(sums["bytes_down"][lane.row])),
            "mfu": round(float(shares[n]), 4),
        }
        for n, lane in enumerate(lanes)
    ]


def _mfu(
    tokens: Array, seconds: Array, lanes: list[Lane], flops_per_token: float | None
) -> Array:
    """Return model FLOPs utilisation, [R]: the FLOPs of the tokens, over those of the
    devices at their peak in these seconds of training. NaN if the model or the device
    has no known ones."""
    peaks = np.array([lane.peak_flops_per_s for lane in lanes])
    return _mean(tokens * (flops_per_token or math.nan), seconds * peaks)


def _runs(codes: npt.NDArray[np.int64]) -> str:
    """Return a lane as letters, each with how many columns it goes on for."""
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    lengths = np.diff(starts, append=len(codes))
    letters = LETTERS + "."
    return "".join(
        f"{letters[codes[start]]}{length}"
        for start, length in zip(starts, lengths, strict=True)
    )


def _levels(shares: Array) -> str:
    """Return shares in [0, 1] as digits from 0 to 9, what is not 0 as 1 at least."""
    levels = np.ceil(np.clip(shares, 0.0, 1.0) * 9 - 1e-3).astype(np.uint8)
    return (levels + ord("0")).tobytes().decode()


def _curves(
    timeline: Timeline,
    lanes: list[Lane],
    window: Window,
    points: int,
    flops_per_token: float | None,
) -> dict[str, Any]:
    grid, rows = timeline.grid, [lane.row for lane in lanes]
    # A curve has no more points than the grid has bins.
    within = int((window.stop - window.start) / grid.width_s)
    merges = grid.totals(("merges",), window.start, window.stop)[0, COORDINATOR]
    beats = max(FEWEST_POINTS, int(merges / MERGES_OF_A_POINT))
    points = max(1, min(points, within, beats))
    seconds = (window.stop - window.start) / points
    at = (window.start, window.stop, points)
    found = grid.columns(OF_ISLANDS, *at)[:, rows]
    of = dict(zip(OF_ISLANDS, found, strict=True))
    both = (*DIGITS, *map(count_of, DIGITS))
    sums, counts = np.split(grid.columns(both, *at, slice(0, 1))[:, COORDINATOR], 2)
    means = dict(zip(DIGITS, _mean(sums, counts), strict=True))
    lag = _mean(of["lag"], of[count_of("lag")])
    known = np.array([lane.peak_flops_per_s > 0 for lane in lanes], bool)
    peaks = np.array([[lane.peak_flops_per_s] for lane in lanes]).reshape(-1, 1)
    mfu = _mean(
        of["tokens"][known].sum(axis=0) * (flops_per_token or math.nan),
        (of["training"] * peaks).sum(axis=0),
    )
    # An island's first tokens are told with its first report, as if of the time since
    # its hello.
    few = of["training"].sum(axis=0) < FEW_TRAIN * seconds * max(1, len(lanes))
    mfu = np.where(few, np.nan, mfu)

    def total(name: str, over: float) -> list[float]:
        return [float(f"{v:.4g}") for v in of[name].sum(axis=0) / over]

    def by_island(name: str) -> dict[str, list[float]]:
        drawn = zip(lanes, _mean(of[name], of[count_of(name)]), strict=True)
        told = ((lane, curve) for lane, curve in drawn if np.isfinite(curve).any())
        return {lane.name: _rounded(curve, 3) for lane, curve in told}

    losses, tokens = _mean(of["loss"], of[count_of("loss")]), of["tokens"]
    heard = np.isfinite(losses)
    before = grid.totals(("merged_tokens",), grid.begin or 0.0, window.start).sum()
    so_far = before + np.cumsum(of["merged_tokens"].sum(axis=0))
    so_far = np.concatenate([[before], so_far]) / timeline.fragments
    edges = window.start + seconds * np.arange(points + 1)
    merged = [p for p in timeline.merged_losses if window.start <= p[0] < window.stop]
    behind = np.isfinite(lag)
    most = lag.max(axis=0, initial=-np.inf, where=behind)
    first = window.start + seconds / 2
    return {
        "times": np.round(first + seconds * np.arange(points), 2).tolist(),
        "loss": by_island("loss"),
        "eval_loss": by_island("eval_loss"),
        "mean_loss": _rounded(
            _mean(
                np.where(heard, losses * tokens, 0.0).sum(axis=0),
                (heard * tokens).sum(axis=0),
            ),
            4,
        ),
        "merged_loss": [
            [*point, round(float(np.interp(point[0], edges, so_far)))]
            for point in _thinned(merged, MERGED_LOSSES_SHOWN)
        ],
        "tokens": np.round((so_far[1:] + so_far[:-1]) / 2).tolist(),
        "computed": total("tokens", seconds),
        "merged": total("merged_tokens", seconds * timeline.fragments),
        "up": total("bytes_up", seconds),
        "down": total("bytes_down", seconds),
        "behind_mean": _rounded(
            _mean(np.nansum(lag, axis=0), 1.0 * behind.sum(axis=0)), 2
        ),
        "behind_most": _rounded(np.where(behind.any(axis=0), most, np.nan), 2),
        "mfu": _rounded(mfu, 4),
        **{name: _rounded(means[name], digits) for name, digits in DIGITS.items()},
    }


def _thinned(points: list[T], most: int) -> list[T]:
    """Return at most that many of the points, evenly, and always the newest."""
    every = max(1, math.ceil(len(points) / most))
    return points[::-every][::-1]


def _mean(sums: Array, counts: Array) -> Array:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 1e-6)


def _rounded(values: Array, digits: int) -> list[float]:
    found: list[float] = np.round(values, digits).tolist()
    return found


def _away(timeline: Timeline, window: Window) -> dict[str, float]:
    """Return the seconds of the window for which each was away."""
    found: dict[str, float] = {}
    for one in timeline.failures.within(window.start, window.stop):
        if not one.quarantine:
            stop = min(one.ended or timeline.newest, window.stop)
            seconds = max(0.0, stop - max(one.began, window.start))
            found[one.who] = found.get(one.who, 0.0) + seconds
    return found


def _where_it_went(
    timeline: Timeline, lanes: list[Lane], window: Window, goodput: float | None
) -> dict[str, Any]:
    """Return where all islands' time in the window went, in tokens that they would have
    computed undisturbed: merged, lost, computed and not merged yet, or never computed.

    The time is that of `observability/measures.py`, so that the part that is merged is
    the goodput of the window. goodput: that of the run, which it then is.
    """
    names = (*STATES, "tokens", "merged_tokens", "lost_tokens", "stalled_seconds")
    lanes = [lane for lane in lanes if lane.median_step_seconds > 0]
    found = timeline.grid.totals(names, window.start, window.stop)
    of = dict(zip(names, found[:, [lane.row for lane in lanes]], strict=True))
    speed = np.array([one.tokens_per_step / one.median_step_seconds for one in lanes])
    seconds = _away(timeline, window)
    away = np.array([seconds.get(lane.name, 0.0) for lane in lanes])
    present = np.sum([of[state] for state in STATES if state != "stopped"], axis=0)
    # Compiling after an outage is part of it; the first compilation is apart.
    compiling = of["joining"] + of["compiling"] - np.maximum(0.0, away - of["absent"])
    provisioned = present - np.maximum(0.0, compiling)
    stalled, computed = np.minimum(of["stalled_seconds"], provisioned), of["tokens"]
    merged = of["merged_tokens"] / timeline.fragments
    lost = of["lost_tokens"]
    parts = {
        "merged": merged,
        "lost": lost,
        "open": computed - merged - lost,
        "stalled": stalled * speed,
        "away": away * speed,
        "slower": (provisioned - away - stalled) * speed - computed,
    }
    sums = {name: max(0.0, float(part.sum())) for name, part in parts.items()}
    whole = sum(sums.values()) or 1.0
    shares = {name: part / whole for name, part in sums.items()}
    if goodput is not None and shares["merged"] < 1.0:
        rest = (1.0 - goodput) / (1.0 - shares["merged"])
        shares = {name: share * rest for name, share in shares.items()}
        shares["merged"] = goodput
    reasons: dict[str, int] = {}
    for time, reason, tokens in timeline.lost:
        if window.start <= time < window.stop:
            reasons[reason] = reasons.get(reason, 0) + tokens
    return {"parts": shares, "lost": reasons}


def _failures(timeline: Timeline, window: Window) -> dict[str, Any]:
    """Return the newest failures of the window, the oldest first, in the order of
    `FAILURE`, and how many there are. Times are seconds from the beginning of the run;
    reasons are places in `whys`."""
    begin = timeline.grid.begin or 0.0
    found = list(timeline.failures.within(window.start, window.stop))

    def after(time: float | None) -> float | None:
        # Their differences are shown to a tenth, as the summary has them.
        return None if time is None else round(time - begin, 3)

    kept = found[FAILURES_SHOWN - 1 :: -1] if found else []
    whys = list(dict.fromkeys(one.why for one in kept))
    shown = [
        [
            *(one.who, after(one.began), after(one.ended), whys.index(one.why)),
            *(one.lost_tokens, one.idle_tokens, one.without, after(one.merged)),
        ]
        for one in kept
    ]
    return {"count": len(found), "fields": FAILURE, "whys": whys, "shown": shown}


def _merges(
    timeline: Timeline, names: list[str], window: Window
) -> list[dict[str, Any]]:
    """Return the newest merges of the window, the oldest first; `weights` are shares of
    the merge's tokens in thousandths, in the order of the islands."""
    shown = []
    for merge in timeline.recent_merges(window.start, window.stop, MERGES_SHOWN):
        total = sum(merge["tokens"].values()) or 1
        weights = [round(1000 * merge["tokens"].get(n, 0) / total) for n in names]
        shown.append({**merge, "tokens": total, "weights": weights})
    return shown


def find_events(
    timeline: Timeline, wanted: str, start: float, stop: float, most: int
) -> dict[str, Any]:
    """Return the newest events of [start, stop) that have all words, in any case."""
    words = wanted.lower().split()
    found: list[list[Any]] = []
    more = False
    for event in reversed(timeline.events):
        if not start <= event.time < stop:
            continue
        text = f"{event.kind} {event.text}".lower()
        if all(word in text for word in words):
            if len(found) == most:
                more = True
                break
            found.append(list(event))
    return {"events": found, "more": more}
