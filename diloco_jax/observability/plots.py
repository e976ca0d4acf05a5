"""Plots of a history, and what all plots of the project have in common.

Colours are those of Okabe and Ito, which the colour-blind tell apart. The paper is
opaque, so that a dark page shows a plot as a light one does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from diloco_jax.observability.history import History

BLUE, GREEN, ORANGE, PINK, SKY = "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY, PAPER = "#222222", "#999999", "#ffffff"
LINES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (PINK, ":"), (SKY, "-"))
"""Colour and style of the first line, the second one and so on."""
MOST_MARKS = 60
"""Takes and adoptions of one island that can be told apart in one plot."""
MOST_BARS = 120
"""Steps of one island that can be told apart in one plot."""
SMOOTHED = 15
"""A point of a loss curve is the mean over one in so many of the island's steps."""
STANDSTILL = 3.0
"""A pause of an island, in its median steps, from which on it counts as one."""


def paper(
    width: float, height: float, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure, in inches, and its axes from left to right."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, columns, figsize=(width, height), facecolor=PAPER, squeeze=False, **options
    )
    for one in axes[0]:
        one.set_facecolor(PAPER)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def say(axes: Axes, finding: str, x: str = "", y: str = "") -> None:
    """Write the finding above, and what the axes are, with their units."""
    axes.set_title(finding, color=INK, loc="left", fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)


def timeline(
    history: History,
    begin: float,
    end: float | None,
    title: str | None,
    axes: Axes | None,
) -> Axes:
    """Draw `History.plot_timeline`."""
    steps, merges = history.frame("steps"), history.frame("merges")
    if end is None:
        end = float(max([begin + 1e-9, *steps.time, *merges.time]))
    if axes is None:
        lanes = len(history.islands) + 1
        _, (axes,) = paper(10, 1.5 + 0.42 * lanes, layout="constrained")
    shown = merges[merges.time.between(begin, end)]
    axes.plot(shown.time, [0.0] * len(shown), "|", color=INK, markersize=13)
    few = all(
        len(_of(history.frame(name), island, begin, end)) <= MOST_MARKS
        for name in ("takes", "adoptions")
        for island in history.islands
    )
    for lane, island in enumerate(history.islands, start=1):
        own = steps[(steps.island == island) & (steps.began < end)]
        own = own[own.time > begin]
        apart = len(own) <= MOST_BARS and not history.recorded
        bars = _bars(own, None if apart else (end - begin) / 200)
        axes.broken_barh(bars, (lane - 0.33, 0.66), color=SKY, alpha=0.6, lw=0)
        for ended, away in history.absences(island):
            _away(axes, lane, max(begin, ended), min(end, ended + away), end - begin)
        if few:
            takes = _of(history.frame("takes"), island, begin, end)
            axes.plot(
                takes.time, [lane - 0.13] * len(takes), "^", color=ORANGE, ms=6, mew=0
            )
            adopted = _of(history.frame("adoptions"), island, begin, end)
            axes.plot(
                adopted.time, [lane + 0.13] * len(adopted), "v", color=BLUE, ms=6, mew=0
            )
    _key(axes, few)
    axes.set_yticks(range(len(history.islands) + 1), ["merges", *history.islands])
    axes.set(xlim=(begin, end), ylim=(len(history.islands) + 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    say(axes, title or _finding(history, steps), _clock(history))
    return axes


def losses(
    history: History, final: float | None, title: str | None, axes: Axes | None
) -> Axes:
    """Draw `History.plot_loss`."""
    steps, judged = history.frame("steps"), history.frame("evaluations")
    if axes is None:
        _, (axes,) = paper(7.5, 3.8, layout="constrained")
    for index, island in enumerate(history.islands):
        own = steps[(steps.island == island) & np.isfinite(steps.loss)]
        window = max(1, len(own) // SMOOTHED)
        curve = own.loss.rolling(window, min_periods=1).mean()
        colour, style = LINES[index % len(LINES)]
        axes.plot(own.time, curve, style, color=colour, lw=1.8, label=island)
    if len(judged):
        axes.plot(
            judged.time, judged.loss, "o", color=INK, ms=4, label="merged, validation"
        )
    if final is not None:
        label = f"merged, validation: {final:.2f}"
        axes.axhline(final, color=INK, lw=1.2, ls=(0, (6, 3)), label=label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    found = steps.loss[np.isfinite(steps.loss)]
    if title is None and len(found):
        last = found.iloc[-1] if final is None else final
        seconds = f"{steps.time.max():,.0f} {_clock(history).split(' since')[0]}"
        title = f"The loss falls from {found.iloc[0]:.2f} to {last:.2f} in {seconds}"
    say(axes, title or "No step was made", _clock(history), "loss, nats per token")
    return axes


def _of(
    events: pandas.DataFrame, island: str, begin: float, end: float
) -> pandas.DataFrame:
    return events[(events.island == island) & events.time.between(begin, end)]


def _bars(steps: pandas.DataFrame, gap: float | None) -> list[tuple[float, float]]:
    """Return (start, length) of bars: one for all steps that follow within `gap`
    seconds; None = one per step, a little short, so that they can be told apart."""
    spans = zip(steps.began, steps.time, strict=True)
    if gap is None:
        return [(start, 0.96 * (stop - start)) for start, stop in spans]
    joined: list[tuple[float, float]] = []
    for start, stop in spans:
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return [(start, stop - start) for start, stop in joined]


def _away(axes: Axes, lane: int, start: float, stop: float, width: float) -> None:
    """Draw an outage, with its length if there is room for it."""
    if math.isnan(stop) or stop <= start:
        return
    bar = [(start, stop - start)]
    axes.broken_barh(
        bar, (lane - 0.33, 0.66), facecolor="#eeeeee", edgecolor=GREY, hatch="////"
    )
    if stop - start > 0.07 * width:
        axes.text(
            (start + stop) / 2,
            lane,
            f"away {stop - start:.0f} s",
            ha="center",
            va="center",
            color=INK,
            fontsize=9,
            bbox={"facecolor": "#eeeeee", "edgecolor": "none", "pad": 1.5},
        )


def _key(axes: Axes, marks: bool) -> None:
    """Explain bars and marks below the axes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], marker="|", color=INK, ls="", ms=10, label="merge"),
        Patch(color=SKY, alpha=0.6, lw=0, label="steps"),
    ]
    for marker, colour, name in (("^", ORANGE, "take"), ("v", BLUE, "adoption")):
        if marks:
            handles.append(
                Line2D([], [], marker=marker, color=colour, ls="", ms=6, label=name)
            )
    axes.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        labelcolor=INK,
    )


def _clock(history: History) -> str:
    return "seconds since the run began" if history.recorded else "virtual seconds"


def _finding(history: History, steps: pandas.DataFrame) -> str:
    """Return what a timeline shows, in one sentence."""
    absences = [
        (away, ended, island)
        for island in history.islands
        for ended, away in history.absences(island)
        if not math.isnan(away)
    ]
    if absences:
        away, ended, island = max(absences)
        others = [name for name in history.islands if name != island]
        still = _never_still(steps, others, ended, ended + away)
        rest = "; the others do not stop" if others and still else ""
        return f"{island} is away for {away:.0f} s{rest}"
    span = steps.groupby("island").agg({"began": "min", "time": "max"})
    lived = float((span.time - span.began).sum())
    if history.recorded or not lived:
        merges = len(history.merges["time"])
        return f"{len(history.islands)} islands, {merges:,} merge{'s' * (merges != 1)}"
    share = float((steps.time - steps.began).sum()) / lived
    return f"Islands are in steps for {share:.0%} of their time"


def _never_still(
    steps: pandas.DataFrame, islands: Sequence[str], begin: float, end: float
) -> bool:
    """Tell whether none of these islands paused between two of its steps then."""
    for island in islands:
        own = steps[(steps.island == island) & (steps.time > begin)]
        own = own[own.began < end]
        if not len(own):
            return False
        pauses = own.began.to_numpy()[1:] - own.time.to_numpy()[:-1]
        usual = float((own.time - own.began).median())
        if own.began.iloc[0] > begin + usual or own.time.iloc[-1] < end - usual:
            return False
        if len(pauses) and pauses.max() > STANDSTILL * usual:
            return False
    return True
