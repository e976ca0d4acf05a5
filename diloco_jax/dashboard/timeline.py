"""A run over time, out of the lines of its tape and its metrics, in bounded memory.

Times are the coordinator's, in unix seconds. Tokens of deltas count once for each
fragment; divided by the number of fragments they compare with tokens of steps. Numbers
are summed in a grid by bins of time, for any width of screen.

Shapes: `F` fields, `R` rows (the coordinator and the islands), `B` bins, `C` columns.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_jax.dashboard.failures import Failures, Lane
from diloco_jax.observability.tape import Repeats

BINS = 4096
WIDTH_S = 0.25
"""Seconds of a bin at first."""

Array = npt.NDArray[np.float64]


class Grid:
    """Sums of quantities by field, row and bin.

    When a run outgrows its bins, each two of them become one, and a bin is twice as
    long: an hour has bins of one second, a week has bins of four minutes.
    """

    def __init__(
        self, fields: Sequence[str], bins: int = BINS, width_s: float = WIDTH_S
    ) -> None:
        """bins: even number B. width_s: seconds of a bin at first."""
        self.width_s = width_s
        self.begin: float | None = None
        """Unix time at which the first bin begins; None before anything is added."""
        self.rows = 0
        self._index = {name: number for number, name in enumerate(fields)}
        self._bins = bins
        self._sums = np.zeros((len(fields), 0, bins), np.float32)

    def new_row(self) -> int:
        """Return the number of one more row."""
        self.rows += 1
        fields, room, bins = self._sums.shape
        if self.rows > room:
            larger = np.zeros((fields, max(4, 2 * room), bins), np.float32)
            larger[:, :room] = self._sums
            self._sums = larger
        return self.rows - 1

    def add(self, field: str, row: int, time: float, value: float) -> None:
        """Add a value to the bin of a time, in unix seconds."""
        self._sums[self._index[field], row, int(self._place(time))] += value

    def spread(
        self, field: str, row: int, start: float, stop: float, value: float
    ) -> None:
        """Add a value evenly over [start, stop), in unix seconds."""
        if self.begin is None:
            self.begin = start
        last = self._place(stop)
        # After the last one: its bins may have become longer.
        first = max(0.0, (start - self.begin) / self.width_s)
        if last <= first:
            return
        sums = self._sums[self._index[field], row]
        low, high = int(first), int(last)
        if low == high:
            sums[low] += value
            return
        each = value / (last - first)
        sums[low] += each * (low + 1 - first)
        if high > low + 1:
            sums[low + 1 : high] += each
        sums[high] += each * (last - high)

    def columns(
        self,
        fields: Sequence[str],
        start: float,
        stop: float,
        count: int,
        rows: slice = slice(None),
    ) -> Array:
        """Return sums [F, R, C] of `count` equal columns of [start, stop), of these
        rows.

        What lies in a bin counts as spread evenly over it.
        """
        numbers = [self._index[name] for name in fields]
        rows = slice(*rows.indices(self.rows))
        if self.begin is None or stop <= start:
            return np.zeros((len(fields), rows.stop - rows.start, count))
        edges = np.linspace(start, stop, count + 1) - self.begin
        edges = np.clip(edges / self.width_s, 0, self._bins)
        low, high = int(edges[0]), int(np.ceil(edges[-1]))
        part = self._sums[numbers, rows, low:high]
        until = np.zeros((*part.shape[:2], high - low + 1))
        np.cumsum(part, axis=-1, out=until[..., 1:])
        whole = np.minimum((edges - low).astype(int), max(high - low - 1, 0))
        rest = edges - low - whole
        after = np.minimum(whole + 1, high - low)
        reached = until[..., whole] + rest * (until[..., after] - until[..., whole])
        found: Array = np.diff(reached, axis=-1)
        return found

    def totals(self, fields: Sequence[str], start: float, stop: float) -> Array:
        """Return sums [F, R] of [start, stop)."""
        numbers = [self._index[name] for name in fields]
        if self.begin is None or stop <= start:
            return np.zeros((len(fields), self.rows))
        ends = (np.array([start, stop]) - self.begin) / self.width_s
        first, last = np.clip(ends, 0, self._bins)
        low, high = int(first), int(np.ceil(last))
        bins = np.arange(low, high)
        shares = np.minimum(bins + 1, last) - np.maximum(bins, first)
        found: Array = self._sums[numbers, : self.rows, low:high] @ shares
        return found

    def _place(self, time: float) -> float:
        """Return a time as a number of bins; make bins longer until it is within."""
        if self.begin is None:
            self.begin = time
        while (place := (time - self.begin) / self.width_s) >= self._bins:
            self._fold()
        return max(0.0, place)

    def _fold(self) -> None:
        half = self._bins // 2
        self._sums[..., :half] = self._sums[..., ::2] + self._sums[..., 1::2]
        self._sums[..., half:] = 0.0
        self.width_s *= 2


@dataclasses.dataclass(kw_only=True)
class ShownMerge:
    """One merge: who took part, with how many tokens, and its measures."""

    time: float
    fragment: int
    version: int
    final: bool
    share: float
    tokens: dict[str, int]
    stale: dict[str, int]
    """Versions by which a delta's base was behind; only those that were."""
    measures: Mapping[str, float | None] = dataclasses.field(default_factory=dict)


TEXTS = {
    "begun": "run {run_id} begins, to {total_tokens:,} tokens",
    "compiled": "the coordinator has compiled what merges need",
    "recovered": "the coordinator is back, from snapshot {snapshot} and {records:,} "
    "records of its log",
    "term": "term {term} begins with anchors of islands",
    "hello": "{who} says hello from {peer} ({device})",
    "joined": "{who} joins with {tokens_per_step:,} tokens a step",
    "resumed": "{who} is back after {steps:,} steps",
    "absent": "{who} is away: {why}",
    "left": "{who} ended after {steps:,} steps: {reason}{said}; {cost}",
    "leaving": "{who} is leaving, and sends what it has",
    "refused": "the delta of {who} for fragment {fragment} is refused: {reason}",
    "skipped": "tick {tick} of fragment {fragment} is skipped: {why}",
    "turned_away": "{island} is turned away ({code}): {message}",
    "quarantined": "{who} is quarantined after {refused} unfit deltas",
    "released": "{who} is out of quarantine",
    "stopping": "the run has its tokens ({tokens:,}): the flush begins",
    "finished": "the run is over",
    "extended": "the run goes on to {total_tokens:,} tokens",
    "alert": "{text}",
}
"""Sentences for lines of the tape, by their kinds."""


def text_of(line: Mapping[str, Any]) -> str:
    """Return what a line of the tape says; for an unknown kind, its fields."""
    if line["kind"] not in TEXTS:
        shown = {k: v for k, v in line.items() if k not in ("kind", "time", "prev")}
        return ", ".join(f"{name} {value}" for name, value in shown.items())
    told = {**line, "who": f"{line.get('island')} #{line.get('incarnation')}"}
    match line["kind"]:
        case "hello":
            told["device"] = line["environment"].get("device_kind", "")
        case "left":
            of_fragments = line["lost_tokens_by_fragment"]
            lost = sum(of_fragments) / max(1, len(of_fragments))
            told["said"] = f" ({line['said']})" if line["said"] else ""
            told["cost"] = f"{lost:,.0f} tokens are lost" if lost else "nothing is lost"
    return TEXTS[line["kind"]].format(**told)


STATES = ("joining", "compiling", "training", "stopped", "quarantined", "absent")
SUMS = (
    *("out", "takes", "adoptions", "merged_deltas", "merged_tokens", "lost_tokens"),
    *("tokens", "loss", "losses", "eval_loss", "eval_losses", "stalled"),
    *("bytes_up", "bytes_down", "lag", "lags"),
    # On the coordinator's row:
    *("merges", "cosine", "cosines", "last_cosine", "last_cosines", "merge_seconds"),
    *("memory", "workers_memory", "memory_left", "disk", "looks"),
)
"""Fields besides the seconds in each state. A mean has its sum and its count."""
COUNTED = {
    "stalled_seconds": "stalled",
    "bytes_up": "bytes_up",
    "bytes_down": "bytes_down",
}
"""Field of the grid by name in the metrics, of what an incarnation counts up."""
MACHINE = {
    "memory_bytes": "memory",
    "memory_left_bytes": "memory_left",
    "disk_free_bytes": "disk",
}
"""Likewise, of a look at the coordinator's machine."""
COORDINATOR = 0
"""Row of the coordinator."""
MERGES_KEPT = 20_000
EVENTS_KEPT = 20_000
ALERTS_KEPT = 100
POINTS_KEPT = 4_000
LEFT_IN_ORDER = ("finished", "stopped")
ROUTINE = ("island", "tick", "granted", "ticks", "measured", "digested", "merged")
"""Kinds of lines of the tape that are no events for people, or have views."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A line of the tape that people look for."""

    time: float
    kind: str
    island: str
    text: str


class Timeline:
    """All lines so far. Use under one lock."""

    def __init__(self) -> None:
        self.grid = Grid([*STATES, *SUMS])
        self.lanes: dict[str, Lane] = {}
        self.coordinator = Lane(name="coordinator", row=self.grid.new_row())
        self.versions: dict[int, int] = {}
        self.merges: deque[ShownMerge] = deque(maxlen=MERGES_KEPT)
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.alerts: deque[tuple[float, str]] = deque(maxlen=ALERTS_KEPT)
        self.merged_losses: deque[tuple[float, int, float]] = deque(maxlen=POINTS_KEPT)
        """(time, cycle, loss) of the merged model."""
        self.lost: deque[tuple[float, str, float]] = deque(maxlen=POINTS_KEPT)
        """(time, reason, tokens) of incarnations that ended with open steps."""
        self.failures = Failures()
        self.newest = 0.0
        """Time of the newest line."""
        self._newest_merge: dict[int, ShownMerge] = {}
        self._repeats = Repeats()
        self._published = 0
        """Sum of `versions`."""

    @property
    def fragments(self) -> int:
        """Fragments that were ever merged; 1 before any was."""
        return max(self.versions, default=0) + 1

    def settle(self) -> None:
        """Bring the grid up to the newest line."""
        for lane in (self.coordinator, *self.lanes.values()):
            self._paint(lane, self.newest)

    # ---- lines of the tape ----------------------------------------------------------

    def tape(self, line: Mapping[str, Any]) -> None:
        """Take a line of the tape. Lines come in the order of time."""
        kind, time = line["kind"], line["time"]
        before = self.newest
        self._clock(time)
        match kind:
            case "begun":
                self._state(self.coordinator, "training", time)
            case "recovered" | "term":
                there = any(lane.state for lane in self.lanes.values())
                since = self.failures.recovered(line, before, time, there=there)
                self._came_back(since, time)
            case "hello" | "joined":
                self._joined(line, time)
            case "island":
                self._fact(line, time)
            case "merged":
                self._merged(line, time)
            case "refused":
                if lane := self.lanes.get(line["island"]):
                    self._answered(lane, line["fragment"], time)
            case "absent":
                lane = self._lane(line["island"])
                self.failures.absent(lane, line["why"], time)
                self._state(lane, "absent", time)
            case "resumed":
                lane = self._lane(line["island"])
                self.failures.resumed(lane, time)
                lane.gap = 0.0
                if lane.state == "absent":
                    self._state(lane, "training", time)
            case "left":
                self._left(line, time)
            case "quarantined" | "released":
                lane, bad = self._lane(line["island"]), kind == "quarantined"
                if bad:
                    self.failures.quarantined(line, lane, time)
                else:
                    self.failures.released(lane, time)
                self._state(lane, "quarantined" if bad else "training", time)
            case "finished":
                self.failures.over()
                for lane in (self.coordinator, *self.lanes.values()):
                    self._state(lane, "", time)
            case "alert":
                self.alerts.append((time, line["text"]))
        if kind not in ROUTINE:
            self.event(time, kind, str(line.get("island", "")), text_of(line))

    def event(self, time: float, kind: str, island: str, text: str) -> None:
        """Note something that people look for."""
        self.events.append(Event(time=time, kind=kind, island=island, text=text))

    def _joined(self, line: Mapping[str, Any], time: float) -> None:
        lane = self._lane(line["island"])
        if line["kind"] == "hello":
            return lane.hello(line)
        if lane.incarnation != line["incarnation"]:
            steps = (line.get("carried") or {}).get("steps", 0)
            self._begins(lane, line["incarnation"], time, steps)
        lane.tokens_per_step = line["tokens_per_step"]

    def _begins(self, lane: Lane, incarnation: int, time: float, steps: int) -> None:
        self._away_since_gap(lane)
        self._state(lane, "joining", time)
        lane.incarnation, lane.steps = incarnation, steps
        lane.counts, lane.adopted, lane.adoptions, lane.told = {}, {}, 0, time
        self._nothing_out(lane, time)

    def _left(self, line: Mapping[str, Any], time: float) -> None:
        lane = self._lane(line["island"])
        if lost := sum(line["lost_tokens_by_fragment"]):
            self.lost.append((time, line["reason"], lost))
            self.grid.add("lost_tokens", lane.row, time, lost)
        if self.coordinator.state:
            self.failures.left(line, lane, time)
        if lane.incarnation == line["incarnation"]:
            self._away_since_gap(lane)
            # A run that is over says goodbye for those who did not.
            in_order = line["reason"] in LEFT_IN_ORDER or not self.coordinator.state
            self._state(lane, "" if in_order else "absent", time)
            self._nothing_out(lane, time)

    def _fact(self, line: Mapping[str, Any], time: float) -> None:
        lane, record = self._lane(line["island"]), line["record"]
        if lane.incarnation != line["incarnation"] or self._repeats.seen(line):
            return
        fragment = record.get("fragment", -1)
        match record["kind"]:
            case "took":
                self.grid.add("takes", lane.row, time, 1)
                if not lane.out:
                    lane.out_since = time
                lane.out[fragment] = record.get("tick", -1)
            case "adopted":
                if record["step"]:
                    self.grid.add("adoptions", lane.row, time, 1)
                version = record.get("version", (1, 0))[1]
                lane.adoptions += version - lane.adopted.get(fragment, 0)
                lane.adopted[fragment] = version
            case "dropped" | "reset" | "reopened":
                self._answered(lane, fragment, time)

    def _merged(self, line: Mapping[str, Any], time: float) -> None:
        fragment, (_, version) = line["fragment"], line["version"]
        tokens: dict[str, int] = {}
        stale: dict[str, int] = {}
        for part in line["contributions"]:
            name = part["island"]
            tokens[name] = tokens.get(name, 0) + part["tokens"]
            if (behind := version - 1 - part["base"][1]) > 0:
                stale[name] = behind
            row = self._lane(name).row
            self.grid.add("merged_deltas", row, time, 1)
            self.grid.add("merged_tokens", row, time, part["tokens"])
        for name, (_, verdict, _) in line["verdicts"].items():
            if verdict != "pending":
                self._answered(self._lane(name), fragment, time)
        self.grid.add("merges", COORDINATOR, time, 1)
        self.failures.merged(tokens, time)
        self._published += version - self.versions.get(fragment, 0)
        self.versions[fragment] = version
        merge = ShownMerge(
            time=time,
            fragment=fragment,
            version=version,
            final=bool(line.get("final")),
            share=line["share"],
            tokens=tokens,
            stale=stale,
        )
        self.merges.append(merge)
        self._newest_merge[fragment] = merge

    def _came_back(self, before: float, time: float) -> None:
        """Note that the coordinator was away since its last line."""
        lane = self.coordinator
        self._paint(lane, before)
        lane.state = "absent" if before else ""
        self._state(lane, "training", time)
        for other in self.lanes.values():
            # Whether it was away, too, its next line tells.
            other.gap = other.gap or before

    def _away_since_gap(self, lane: Lane) -> None:
        """Its incarnation ended while the coordinator was away."""
        if lane.gap and lane.state:
            self._paint(lane, lane.gap)
            lane.state = "absent"
        lane.gap = 0.0

    # ---- lines of the metrics -------------------------------------------------------

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Take a line of the metrics. Lines come in the order of time."""
        time = line["time"]
        self._clock(time)
        match line["kind"]:
            case "island":
                self._island(line, time)
            case "merge":
                self._measured(line, time)
            case "machine":
                self._machine(line, time)
            case "merged_model":
                if line["eval_loss"] is not None:
                    point = (time, line["cycle"], line["eval_loss"])
                    self.merged_losses.append(point)

    def _island(self, line: Mapping[str, Any], time: float) -> None:
        lane = self._lane(line["island"])
        phase = line["phase"]
        # One that has left may have reported until then.
        here = lane.state not in ("", "quarantined")
        if here and lane.state != phase and phase in STATES:
            self._state(lane, phase, time)
        lane.gap = 0.0
        lane.median_step_seconds = (
            line["median_step_seconds"] or lane.median_step_seconds
        )
        row, told = lane.row, lane.told or time
        steps = line["step"] - lane.steps
        if since := self.failures.reported(lane, steps, phase, time):
            self._was_away(lane, since, time)
        lane.steps = line["step"]
        if steps > 0:
            self.grid.spread("tokens", row, told, time, steps * lane.tokens_per_step)
        for name, field in COUNTED.items():
            more = line[name] - lane.counts.get(name, 0.0)
            lane.counts[name] = line[name]
            if more > 0:
                self.grid.spread(field, row, told, time, more)
        for name, count in (("loss", "losses"), ("eval_loss", "eval_losses")):
            if line[name] is not None:
                self.grid.add(name, row, time, line[name])
                self.grid.add(count, row, time, 1)
        if lane.adopted and self.versions:
            behind = (self._published - lane.adoptions) / len(self.versions)
            self.grid.add("lag", row, time, max(0.0, behind))
            self.grid.add("lags", row, time, 1)
        lane.told = time

    def _measured(self, line: Mapping[str, Any], time: float) -> None:
        merge = self._newest_merge.get(line["fragment"])
        if merge is not None and merge.version == line["version"]:
            merge.measures = {
                name: line[name]
                for name in ("pairwise_cosine", "cosine_to_last", "norm", "seconds")
            }
        for name, field in (
            ("pairwise_cosine", "cosine"),
            ("cosine_to_last", "last_cosine"),
        ):
            if line[name] is not None:
                self.grid.add(field, COORDINATOR, time, line[name])
                self.grid.add(f"{field}s", COORDINATOR, time, 1)
        self.grid.add("merge_seconds", COORDINATOR, time, line["seconds"])

    def _machine(self, line: Mapping[str, Any], time: float) -> None:
        for name, field in MACHINE.items():
            self.grid.add(field, COORDINATOR, time, line[name])
        workers = sum(line["workers_memory_bytes"])
        self.grid.add("workers_memory", COORDINATOR, time, workers)
        self.grid.add("looks", COORDINATOR, time, 1)

    # ---- what else is seen ----------------------------------------------------------

    def seen(self, time: float, name: str, island: Mapping[str, Any]) -> None:
        """Note an incarnation of a status, whose past is not known."""
        lane = self._lane(name)
        self._begins(lane, island["incarnation"], time, island["steps"])
        lane.counts = {k: island[k] for k in COUNTED}
        text = f"{name} #{lane.incarnation} is in the run, at step {lane.steps:,}"
        self.event(time, "seen", name, text)

    def _clock(self, time: float) -> None:
        if self.grid.begin is None:
            self.grid.begin = time
        if self.failures.heard(self.newest, time, self._trains):
            self._was_away(self.coordinator, self.newest, time)
        self.newest = max(self.newest, time)

    def _trains(self) -> bool:
        return any(lane.state == "training" for lane in self.lanes.values())

    # ---- states ---------------------------------------------------------------------

    def _lane(self, name: str) -> Lane:
        if name not in self.lanes:
            self.lanes[name] = Lane(name=name, row=self.grid.new_row())
        return self.lanes[name]

    def _state(self, lane: Lane, state: str, time: float) -> None:
        self._paint(lane, time)
        lane.state = state

    def _paint(self, lane: Lane, time: float) -> None:
        """Bring a lane's seconds in the grid up to a time."""
        if lane.state and lane.since and time > lane.since:
            seconds = time - lane.since
            self.grid.spread(lane.state, lane.row, lane.since, time, seconds)
        if lane.out and time > lane.out_since:
            seconds = time - lane.out_since
            self.grid.spread("out", lane.row, lane.out_since, time, seconds)
            lane.out_since = time
        lane.since = max(lane.since, time)

    def _was_away(self, lane: Lane, start: float, stop: float) -> None:
        """Note that a lane was not at work in [start, stop), though it seemed to be."""
        if not lane.state:
            return
        self._paint(lane, stop)
        seconds = stop - start
        self.grid.spread(lane.state, lane.row, start, stop, -seconds)
        self.grid.spread("absent", lane.row, start, stop, seconds)

    def _answered(self, lane: Lane, fragment: int, time: float) -> None:
        """Note that a take has its verdict."""
        if lane.out.pop(fragment, None) is not None and not lane.out:
            self._nothing_out(lane, time)

    def _nothing_out(self, lane: Lane, time: float) -> None:
        if time > lane.out_since > 0:
            seconds = time - lane.out_since
            self.grid.spread("out", lane.row, lane.out_since, time, seconds)
        lane.out, lane.out_since = {}, 0.0

    def recent_merges(
        self, start: float, stop: float, most: int
    ) -> Iterator[ShownMerge]:
        """Yield the newest merges of [start, stop), the newest first."""
        for merge in reversed(self.merges):
            if merge.time < start or most <= 0:
                return
            if merge.time < stop:
                most -= 1
                yield merge
