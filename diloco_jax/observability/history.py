"""Events of a run, emulated or recorded, as arrays; their plots.

Colours of all plots of the project are those of Okabe and Ito, which the colour-blind
tell apart. The paper is opaque, so that a dark page shows a plot as a light one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from diloco_jax import run_files
from diloco_jax.config.fields import as_html
from diloco_jax.errors import ConfigError
from diloco_jax.faults import COORDINATOR
from diloco_jax.observability.failures import Failures, NotedFailure
from diloco_jax.observability.metrics import MEASURES, read_metrics
from diloco_jax.observability.tape import Repeats, read_tape

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Over = Literal["tokens", "seconds"]
"""What a merged model's loss is drawn over: tokens of the run, or its seconds."""
Table = dict[str, np.ndarray]
"""Columns by name, all of one length; a matrix has a column per island."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "merges": (
        *("time", "tokens", "fragment", "version", "final"),
        *("contributions", "share", MEASURES[0], "digest"),
        *MEASURES[1:],
    ),
    "steps": (
        *("island", "incarnation", "step", "began", "time"),
        *("loss", "learning_rate"),
    ),
    "takes": ("island", "incarnation", "fragment", "time", "arrived"),
    "adoptions": ("island", "incarnation", "fragment", "version", "time"),
    "lives": (
        *("island", "incarnation", "began", "first_step"),
        *("ended", "steps", "end"),
    ),
    "outages": ("island", "incarnation", "began", "ended", "why"),
    "evaluations": ("time", "tokens", "loss"),
}
"""Columns of each table of a history."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """Tables of a run. Rows about an island or fragment name it.

    Times are virtual seconds in an emulation; in a recorded run they are seconds since
    its coordinator began, by the coordinator's clock when it heard of the event.

    Example:
      >>> from diloco_jax import Config, emulate, preset
      >>> config = Config().replace("model", preset("tiny"))
      >>> config = config.replace("islands.a.step_seconds", 1.0)
      >>> config = config.replace("total_tokens", 16_384)
      >>> history = emulate(config).history
      >>> history.frame("steps").columns[:3].tolist()
      ['island', 'incarnation', 'step']
      >>> axes = history.plot_timeline()
      >>> axes.get_xlabel()
      'virtual seconds'

    Attributes:
      islands: names, in the order of the columns of matrices.
      merges: time, tokens (of the run, not lost, as far as reported; NaN if recorded),
        fragment, version, final (of the flush), contributions (int [merges, islands]:
        tokens by island, 0 = not in it), share (of all tokens per second that is in
        it), norm (of the merged delta), digest (emulated: of Theta's fragment;
        recorded: of the encoded publish), and the measures of docs/metrics.md.
      steps: island, incarnation, step, began, time (its end), loss (nats per token),
        learning_rate. Completed ones only; the loss of one that had nothing to predict
        is NaN. In a recorded run a row covers all steps between two lines of metrics, a
        second or more apart; step is the last of them.
      takes: island, incarnation, fragment, time, arrived (NaN = never, or recorded).
      adoptions: island, incarnation, fragment, version, time.
      lives: island, incarnation, began, first_step (NaN = none), ended, steps, end
        (why; empty if it had not ended).
      outages: island, incarnation (that went away), began, ended (NaN = not), why;
        see `observability/failures.py`.
      evaluations: time, tokens (NaN if recorded), loss: of the global parameters.
      recorded: True for a run of real processes, False for an emulation.
    """

    islands: tuple[str, ...]
    merges: Table
    steps: Table
    takes: Table
    adoptions: Table
    lives: Table
    outages: Table
    evaluations: Table
    recorded: bool = False

    def frame(self, name: str) -> pandas.DataFrame:
        """Return one of the tables; a matrix's columns are called
        `contributions.ISLAND`. Raises KeyError if there is no such table."""
        import pandas

        columns: dict[str, Any] = {}
        for key, values in self._table(name).items():
            if values.ndim == 1:
                columns[key] = values
                continue
            for island, column in zip(self.islands, values.T, strict=True):
                columns[f"{key}.{island}"] = column
        return pandas.DataFrame(columns)

    def absences(self, island: str) -> list[tuple[float, float]]:
        """Return the beginning of each outage of an island, and its seconds; NaN if it
        did not end."""
        mine = self.outages["island"] == island
        spans = zip(
            self.outages["began"][mine], self.outages["ended"][mine], strict=True
        )
        return [(float(began), float(ended - began)) for began, ended in spans]

    def write(self, folder: Path) -> None:
        """Write one CSV file per table."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in COLUMNS:
            self.frame(name).to_csv(folder / f"{name}.csv", index=False)

    def plot_timeline(
        self,
        begin: float = 0.0,
        end: float | None = None,
        *,
        title: str | None = None,
        axes: Axes | None = None,
    ) -> Axes:
        """Draw who computed, sent and adopted when, one lane per island.

        Args:
          begin, end: seconds that are shown; None = to the last event.
          title: None = what the history shows, in one sentence.
          axes: where to draw; None = a figure of its own.

        Returns:
          The matplotlib axes. Takes and adoptions are drawn while they can be told
          apart; choose a shorter time to see them.

        Raises:
          ConfigError: `end` is not after `begin`.
        """
        steps, merges = self.frame("steps"), self.frame("merges")
        if end is None:
            end = float(max([begin + 1e-9, *steps.time, *merges.time]))
        if not begin < end:
            raise ConfigError(f"end = {end:g} s is not after begin = {begin:g} s")
        if axes is None:
            lanes = len(self.islands) + 1
            _, (axes,) = paper(10, 1.5 + 0.42 * lanes, layout="constrained")
        shown = merges[merges.time.between(begin, end)]
        axes.plot(shown.time, [0.0] * len(shown), "|", color=INK, markersize=13)
        few = all(
            len(_of(self.frame(name), island, begin, end)) <= MOST_MARKS
            for name in MARKS
            for island in self.islands
        )
        for lane, island in enumerate(self.islands, start=1):
            own = steps[(steps.island == island) & (steps.began < end)]
            own = own[own.time > begin]
            apart = len(own) <= MOST_BARS and not self.recorded
            bars = _bars(own, None if apart else (end - begin) / 200)
            axes.broken_barh(bars, (lane - 0.33, 0.66), color=SKY, alpha=0.6, lw=0)
            for ended, away in self.absences(island):
                stop = min(end, ended + away)
                _away(axes, lane, max(begin, ended), stop, end - begin)
            for name, (marker, colour, above, _) in MARKS.items() if few else ():
                found = _of(self.frame(name), island, begin, end)
                place = [lane + above] * len(found)
                axes.plot(found.time, place, marker, color=colour, ms=6, mew=0)
        _key(axes, few)
        axes.set_yticks(range(len(self.islands) + 1), ["merges", *self.islands])
        axes.set(xlim=(begin, end), ylim=(len(self.islands) + 0.5, -0.5))
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        say(axes, title or _finding(self), _clock(self))
        return axes

    def plot_loss(
        self,
        *,
        final: float | None = None,
        parent: History | None = None,
        title: str | None = None,
        axes: Axes | None = None,
    ) -> Axes:
        """Draw the training loss of every island over time, and the validation losses.

        Args:
          final: validation loss at the end, nats per token; drawn as a line.
          parent: the run that this one was forked from, drawn pale behind it.
          title: None = from where to where the loss falls.
          axes: where to draw; None = a figure of its own.

        Returns:
          The matplotlib axes.
        """
        steps, judged = self.frame("steps"), self.frame("evaluations")
        if axes is None:
            _, (axes,) = paper(7.5, 3.8, layout="constrained")
        for run in (self,) if parent is None else (parent, self):
            of = run.frame("steps")
            for index, island in enumerate(run.islands):
                own = of[(of.island == island) & np.isfinite(of.loss)]
                window = max(1, len(own) // SMOOTHED)
                curve = own.loss.rolling(window, min_periods=1).mean()
                colour, style = LINES[index % len(LINES)]
                looks: Any = {"color": colour, "lw": 1.8, "label": island}
                if run is parent:
                    looks |= {"alpha": 0.4, "label": f"{island}, parent"}
                axes.plot(own.time, curve, style, **looks)
        if len(judged):
            looks = {"color": INK, "ms": 4, "label": "merged, validation"}
            axes.plot(judged.time, judged.loss, "o", **looks)
        if final is not None:
            label = f"merged, validation: {final:.2f}"
            axes.axhline(final, color=INK, lw=1.2, ls=(0, (6, 3)), label=label)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, labelcolor=INK, loc="upper right")
        found = steps.loss[np.isfinite(steps.loss)]
        if title is None and len(found):
            last = found.iloc[-1] if final is None else final
            took_s = steps.time.max() - (steps.time.min() if parent else 0.0)
            seconds = f"{took_s:,.0f} {_clock(self).split(' since')[0]}"
            title = (
                f"The loss falls from {found.iloc[0]:.2f} to {last:.2f} in {seconds}"
            )
        clock = _clock(parent or self)
        say(axes, title or "No step was made", clock, "loss, nats per token")
        return axes

    def _repr_html_(self) -> str:
        ends = [*self.steps["time"], *self.merges["time"]]
        rows = {
            "run": "recorded" if self.recorded else "emulated",
            "islands": ", ".join(self.islands),
            "seconds": f"{max(ends, default=0.0):,.1f}",
            **{
                f"rows of {name}": len(self._table(name)["time"])
                for name in COLUMNS
                if "time" in COLUMNS[name]
            },
        }
        return as_html(rows)

    def _table(self, name: str) -> Table:
        if name not in COLUMNS:
            raise KeyError(f"no table {name!r}; there are {', '.join(COLUMNS)}")
        found: Table = getattr(self, name)
        return found


def plot_losses(
    histories: Mapping[str, History | Sequence[History]],
    *,
    over: Over = "tokens",
    title: str | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the validation loss of the merged model of several runs.

    Args:
      histories: by label; several of one label, such as seeds, have one colour.
      over: the tokens that a run has made or, for recorded ones too, its seconds.
      title: None = which label ends lowest, by the mean of its runs; a recorded run
        has its losses of other validation batches than an emulated one, so neither is
        named where both are drawn. What the flush changes is dotted.
      axes: where to draw; None = a figure of its own.

    Returns:
      The matplotlib axes.

    Raises:
      ConfigError: a run is no History, or has no evaluation of its merged model to
        draw; names it.
    """
    if over not in (columns := {"tokens": "tokens", "seconds": "time"}):
        raise ConfigError(f"over = {over!r}; choose from {', '.join(columns)}")
    column, ends, ending, highest = columns[over], dict[str, float](), "", -np.inf
    if not isinstance(histories, Mapping) or not histories:
        raise ConfigError(
            f"histories is {'an empty' if histories == {} else 'a'} "
            f"{type(histories).__name__}; give a dict of at least one History by "
            f"label, as in {{'mine': found.history}}"
        )
    each = {
        label: [given] if isinstance(given, History) else given
        for label, given in histories.items()
    }
    for label, runs in each.items():
        if not isinstance(runs, Sequence) or not all(
            isinstance(run, History) for run in runs
        ):
            raise ConfigError(
                f"{label!r} is no History, nor a list of them; give that of a run, as "
                f"in found.history of an emulation or read_history(workdir)"
            )
    if axes is None:
        _, (axes,) = paper(7.5, 3.8, layout="constrained")
    for number, (label, runs) in enumerate(each.items()):
        colour, style = LINES[number % len(LINES)]
        for run in runs:
            judged = run.evaluations
            known = np.isfinite(judged[column]) & np.isfinite(judged["loss"])
            if not known.any():
                remedy = "EmulationOptions(evaluate_every_tokens=...) has some made"
                if run.recorded:
                    remedy = "placement.watch_every has some made, by 'seconds' alone"
                raise ConfigError(
                    f"{label!r} has {len(judged['loss'])} evaluations of its merged "
                    f"model, none of them with its {over}; {remedy}"
                )
            looks: Any = {"color": colour, "lw": 1.6}
            named = label if run is runs[0] else None
            x, y = judged[column][known], judged["loss"][known]
            last = run.merges["time"][run.merges["final"]][-1:]
            flushed = len(x) > 1 and judged["time"][-1] in last
            until = len(x) - flushed
            axes.plot(x[:until], y[:until], label=named, ls=style, **looks)
            if flushed:
                axes.plot(x[-2:], y[-2:], ls=":", **looks)
                ending = "; dotted: the flush"
            # The fall of the first tenth would hide what comes after.
            highest = max(highest, y[len(y) // 10])
        ends[label] = float(np.mean([run.evaluations["loss"][-1] for run in runs]))
    axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    axes.set_ylim(top=highest + 0.02 * abs(highest))
    best = min(ends, key=ends.__getitem__)
    found = f"{best} ends lowest{ending}"
    if len({run.recorded for own in each.values() for run in own}) > 1:
        found = "recorded and emulated losses, of unlike batches"
    virtual = over == "seconds" and not any(
        r.recorded for own in each.values() for r in own
    )
    x_name = f"virtual {over}" if virtual else over
    say(axes, title or found, x_name, "validation loss, nats per token")
    return axes


def table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Table:
    """Return the columns of rows."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return {name: np.array(v) for name, v in zip(columns, values, strict=True)}


def of_rows(
    islands: tuple[str, ...],
    rows: Mapping[str, Sequence[tuple[Any, ...]]],
    *,
    recorded: bool = False,
) -> History:
    """Return the history with these rows of each table, in the order of COLUMNS."""
    tables: Any = {name: table(COLUMNS[name], rows.get(name, ())) for name in COLUMNS}
    return History(islands=islands, recorded=recorded, **tables)


def outage_rows(
    failures: Iterable[NotedFailure], begin: float = 0.0
) -> list[tuple[Any, ...]]:
    """Return rows of islands' outages. begin: time from which the history counts."""
    return [
        (
            *(one.who, one.incarnation),
            *(one.began - begin, _number(one.ended) - begin, one.why),
        )
        for one in failures
        if one.who != COORDINATOR and not one.quarantine
    ]


PAUSE_S = 1.0
"""Seconds beyond twice its steps' usual time from which an interval has a pause."""

Line = Mapping[str, Any]


def read_history(workdir: str | Path) -> History:
    """Return the history of a run from its workdir, while it goes on or afterwards.

    It reads all of the tape and of `metrics.jsonl`, and keeps a row for every event. Of
    an emulation, or a fork, it reads the tables that it wrote.

    Args:
      workdir: of `diloco run`, `diloco emulate` or `diloco fork`, of a coordinator, or
        `LocalCluster.workdir`.

    Raises:
      ConfigError: the folder has no tape.
      TapeError: the tape was altered, or is damaged.
    """
    workdir = Path(workdir)
    if (tables := workdir / run_files.HISTORY).is_dir():
        return _written(tables)
    if not (workdir / run_files.TAPE).exists():
        raise ConfigError(
            f"{workdir} has no {run_files.TAPE}, so no run was recorded there; give "
            f"the workdir of a run"
        )
    reader = _Reader()
    tape = zip(read_tape(workdir / run_files.TAPE), itertools.repeat(reader.read))
    metrics = zip(_metrics(workdir), itertools.repeat(reader.measured))
    for line, take in heapq.merge(tape, metrics, key=lambda told: told[0]["time"]):
        take(line)
    return reader.history()


def _written(folder: Path) -> History:
    """Read what `History.write` wrote."""
    import pandas

    tables: Any = {}
    islands: tuple[str, ...] = ()
    # A digest of digits alone is no number, and "nan" is a name.
    texts: Any = dict.fromkeys(("island", "digest", "end", "why"), str)
    for name, columns in COLUMNS.items():
        path, numbers = folder / f"{name}.csv", set(columns) - set(texts)
        blank: Any = {key: [""] for key in numbers}
        frame = pandas.read_csv(
            path, dtype=texts, na_values=blank, keep_default_na=False
        )
        matrix = [c for c in frame.columns if c.startswith("contributions.")]
        if matrix:
            islands = tuple(c.partition(".")[2] for c in matrix)
        tables[name] = {
            key: frame[matrix if key == "contributions" else key].to_numpy()
            for key in columns
        }
    return History(islands=islands, **tables)


def _metrics(workdir: Path) -> Iterator[Line]:
    with contextlib.suppress(FileNotFoundError):  # It has only just begun.
        yield from read_metrics(workdir)


@dataclasses.dataclass(kw_only=True)
class _Life:
    """One incarnation of an island; times as on the tape."""

    began: float
    first_step: float = math.nan
    ended: float = math.nan
    steps: int = 0
    end: str = ""


class _Reader:
    """Takes in all lines of tape and metrics, in the order of time."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._last = 0.0
        self._lives: dict[tuple[str, int], _Life] = {}
        self._newest: dict[str, int] = {}
        """Newest incarnation, by island."""
        self._failures = Failures()
        self._repeats = Repeats()
        self._merged: list[Line] = []
        self._measures: dict[tuple[int, int], Line] = {}
        """Line of a merge in the metrics, by fragment and version."""
        self._before: dict[tuple[str, int], tuple[float, int]] = {}
        """Time and step of the newest line of metrics, by incarnation."""
        self._rows: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def read(self, line: Line) -> None:
        """Take in a line of the tape."""
        if self._begin is None:
            self._begin = line["time"]
        kind, now = line["kind"], line["time"] - self._begin
        self._last = now
        self._failures.tape(line)
        who = (line.get("island", ""), line.get("incarnation", 0))
        if kind == "merged":
            self._merged.append(line)
        if kind == "joined":
            self._lives[who] = _Life(began=now)
            self._newest[line["island"]] = line["incarnation"]
        if (life := self._lives.get(who)) is None:
            return
        if kind == "island" and not self._repeats.seen(line):
            self._fact(who, line["record"], now, life)
        elif kind == "left":
            life.ended, life.steps, life.end = now, line["steps"], line["reason"]

    def _fact(
        self, who: tuple[str, int], record: Line, now: float, life: _Life
    ) -> None:
        step, fragment = record["step"], record["fragment"]
        if not step:
            return  # It joins.
        life.steps = max(life.steps, step)
        if math.isnan(life.first_step):
            life.first_step = now
        if record["kind"] == "took":
            self._rows["takes"].append((*who, fragment, now, math.nan))
        elif record["kind"] == "adopted":
            row = (*who, fragment, record["version"][1], now)
            self._rows["adoptions"].append(row)

    def measured(self, line: Line) -> None:
        """Take in a line of the metrics."""
        now = line["time"] - (self._begin or 0.0)
        self._failures.metrics(line)
        if line["kind"] == "merge":
            self._measures[line["fragment"], line["version"]] = line
        elif line["kind"] == "merged_model":
            row = (now, math.nan, _number(line["eval_loss"]))
            self._rows["evaluations"].append(row)
        elif known := self._newest.get(line.get("island", "")):
            self._steps((line["island"], known), line, now)

    def _steps(self, who: tuple[str, int], line: Line, now: float) -> None:
        """Add a row for the steps since the line before."""
        last, step = self._before.get(who, (self._lives[who].began, 0))
        if step < line["step"]:
            usual = (line["step"] - step) * line["median_step_seconds"]
            # The steps come right before the line if they do not fill the time.
            paused = not step or now - last > 2 * usual + PAUSE_S
            began = max(last, now - usual) if paused else last
            loss = _number(line["loss"])
            row = (*who, line["step"] - 1, began, now, loss, line["learning_rate"])
            self._rows["steps"].append(row)
        self._before[who] = (now, line["step"])

    def _merge(self, line: Line, names: tuple[str, ...]) -> None:
        fragment, version = line["fragment"], line["version"][1]
        tokens = dict.fromkeys(names, 0)
        for part in line["contributions"]:
            tokens[part["island"]] += part["tokens"]
        measures = self._measures.get((fragment, version), {})
        norm, *others = (_number(measures.get(name)) for name in MEASURES)
        now = line["time"] - (self._begin or 0.0)
        self._rows["merges"].append(
            (
                *(now, math.nan, fragment, version, line["final"]),
                *(list(tokens.values()), line["share"], norm, line["digest"], *others),
            )
        )

    def history(self) -> History:
        """Return what was read."""
        names = tuple(sorted({island for island, _ in self._lives}))
        for merge in self._merged:
            self._merge(merge, names)
        begin = self._begin or 0.0
        away = {(f.who, f.incarnation): f.began for f in self._failures if f.replaced}
        for who, life in self._lives.items():
            ended = self._last if math.isnan(life.ended) else life.ended
            ended = away.get(who, ended + begin) - begin
            row = (*who, life.began, life.first_step, ended, life.steps, life.end)
            self._rows["lives"].append(row)
        self._rows["outages"] += outage_rows(self._failures, begin)
        return of_rows(names, self._rows, recorded=True)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


BLUE, GREEN, ORANGE, PINK, SKY = "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY, PAPER = "#222222", "#999999", "#ffffff"
LINES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (PINK, (0, (6, 1))), (SKY, "-"))
"""Colour and style of the first line, the second one and so on; no dots, which mean the
flush where losses are drawn."""
MARKS = {
    "takes": ("^", ORANGE, -0.13, "take"),
    "adoptions": ("v", BLUE, 0.13, "adoption"),
}
"""Marker, colour, place above the lane's middle, and name in the key."""
MOST_MARKS = 60
"""Takes and adoptions of one island that can be told apart in one plot."""
MOST_BARS = 120
"""Steps of one island that can be told apart in one plot."""
SMOOTHED = 15
"""A point of a loss curve is the mean over one in so many of the island's steps."""


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
    bar, light = [(start, stop - start)], "#eeeeee"
    looks: Any = {"facecolor": light, "edgecolor": GREY, "hatch": "////"}
    axes.broken_barh(bar, (lane - 0.33, 0.66), **looks)
    if stop - start > 0.07 * width:
        text, middle = f"away {stop - start:.0f} s", (start + stop) / 2
        box: Any = {"facecolor": light, "edgecolor": "none", "pad": 1.5}
        looks = {"ha": "center", "va": "center", "color": INK, "fontsize": 9}
        axes.text(middle, lane, text, bbox=box, **looks)


def _key(axes: Axes, marks: bool) -> None:
    """Explain bars and marks below the axes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], marker="|", color=INK, ls="", ms=10, label="merge"),
        Patch(color=SKY, alpha=0.6, lw=0, label="steps"),
        *(
            Line2D([], [], marker=marker, color=colour, ls="", ms=6, label=name)
            for marker, colour, _, name in (MARKS.values() if marks else ())
        ),
    ]
    beside: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(handles=handles, frameon=False, labelcolor=INK, **beside)


def _clock(history: History) -> str:
    return "seconds since the run began" if history.recorded else "virtual seconds"


def _finding(history: History) -> str:
    """Return what a timeline shows, in one sentence."""
    absences = [
        (away, island)
        for island in history.islands
        for _, away in history.absences(island)
        if not math.isnan(away)
    ]
    if absences:
        away, island = max(absences)
        return f"{island} is away for {away:.0f} s"
    merges = len(history.merges["time"])
    return f"{len(history.islands)} islands, {merges:,} merge{'s' * (merges != 1)}"
