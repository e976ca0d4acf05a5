"""A run over time, out of the lines of its tape and its metrics, in bounded memory.

Times are the coordinator's, in unix seconds. Merged tokens count once for each
fragment; divided by the number of fragments they compare with tokens of steps. Lost
ones are those of the summary. Numbers are summed in a grid by bins of time, for any
width of screen.

Shapes: `F` fields, `R` rows (the coordinator and the islands), `B` bins, `C` columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.hardware.tpus import peak_flops_per_s
from diloco_jax.observability.failures import Failures
from diloco_jax.observability.tape import Repeats

BINS = 4096
WIDTH_S = 0.25
"""Seconds of a bin at first."""

Array = npt.NDArray[np.float64]


def count_of(mean: str) -> str:
    """Return the field that counts the values whose sum is in this one."""
    return f"number of {mean}"


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

    def note(self, mean: str, row: int, time: float, value: float | None) -> None:
        """Add a value of which means are shown, unless it is None."""
        if value is not None:
            self.add(mean, row, time, value)
            self.add(count_of(mean), row, time, 1)

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


def text_of(line: Mapping[str, Any], lost: int) -> str:
    """Return what a line of the tape says; for an unknown kind, its fields.

    lost: tokens that are lost with it.
    """
    if line["kind"] not in TEXTS:
        shown = {k: v for k, v in line.items() if k not in ("kind", "time", "prev")}
        return ", ".join(f"{name} {value}" for name, value in shown.items())
    told = {**line, "who": f"{line.get('island')} #{line.get('incarnation')}"}
    match line["kind"]:
        case "hello":
            told["device"] = line["environment"].get("device_kind", "")
        case "left":
            told["said"] = f" ({line['said']})" if line["said"] else ""
            told["cost"] = f"{lost:,} tokens are lost" if lost else "nothing is lost"
    return TEXTS[line["kind"]].format(**told)


STATES = ("joining", "compiling", "training", "stopped", "quarantined", "absent")
COUNTED = ("stalled_seconds", "bytes_up", "bytes_down")
"""Fields of the metrics that an incarnation counts up."""
MACHINE = ("memory_bytes", "memory_left_bytes", "disk_free_bytes")
"""Fields of a look at the coordinator's machine."""
COSINES = ("pairwise_cosine", "cosine_to_last")
SUMS = (
    *("out", "adoptions", "merged_deltas", "merged_tokens", "lost_tokens", "tokens"),
    *COUNTED,
    "merges",  # On the coordinator's row.
)
"""Fields besides the seconds in each state."""
MEANS = (
    *("loss", "eval_loss", "lag"),
    # On the coordinator's row:
    *(*COSINES, *MACHINE, "workers_memory_bytes"),
)
"""Fields of which means are shown, as the metrics have them."""
COORDINATOR = 0
"""Row of the coordinator."""
MERGES_KEPT = 20_000
EVENTS_KEPT = 20_000
ALERTS_KEPT = 100
POINTS_KEPT = 4_000
LEFT_IN_ORDER = ("finished", "stopped")
ROUTINE = (
    "island",
    "tick",
    "granted",
    "ticks",
    "measured",
    "digested",
    "restored",
    "merged",
)
"""Kinds of lines of the tape that are no events for people, or have views."""


AXES = ("mesh_data", "mesh_fsdp", "mesh_expert", "mesh_tensor")


@dataclasses.dataclass(kw_only=True)
class Lane:
    """One island as of the newest line about it, summed over nothing."""

    name: str
    row: int
    state: str = ""
    """One of `STATES`; empty: it is not in the run."""
    since: float = 0.0
    """Time up to which its states are in the grid."""
    gap: float = 0.0
    """Time at which the coordinator last heard of it before it was away itself."""
    incarnation: int = 0
    tokens_per_step: int = 0
    median_step_seconds: float = 0.0
    device: str = ""
    stands_for: str = ""
    peak_flops_per_s: float = 0.0
    """Sum over all its devices; 0 if the tables of `diloco plan` do not know them."""
    steps: int = 0
    told: float = 0.0
    """Time of its last line of metrics."""
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    adopted: dict[int, int] = dataclasses.field(default_factory=dict)
    """Version by fragment."""
    out: dict[int, int] = dataclasses.field(default_factory=dict)
    """Tick by fragment of takes without a verdict."""
    out_since: float = 0.0

    def hello(self, line: Mapping[str, Any]) -> None:
        """Take what an incarnation says of its devices."""
        config = line["config"]
        self.device = str(line["environment"].get("device_kind", ""))
        self.stands_for = str(config.get("stands_for", ""))
        devices = math.prod(int(config.get(axis, 1)) for axis in AXES)
        self.peak_flops_per_s = devices * (peak_flops_per_s(self.device) or 0.0)


class Event(NamedTuple):
    """A line of the tape that people look for."""

    time: float
    kind: str
    island: str
    text: str


class Timeline:
    """All lines so far. Use under one lock."""

    def __init__(self) -> None:
        self.grid = Grid([*STATES, *SUMS, *MEANS, *map(count_of, MEANS)])
        self.lanes: dict[str, Lane] = {}
        self.coordinator = Lane(name="coordinator", row=self.grid.new_row())
        self.versions: dict[int, int] = {}
        self.merges: deque[dict[str, Any]] = deque(maxlen=MERGES_KEPT)
        """Who took part in each, with how many tokens; `stale`, the versions by which a
        delta's base was behind, where it was; and a cosine once it is known."""
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.alerts: deque[tuple[float, str]] = deque(maxlen=ALERTS_KEPT)
        self.merged_losses: deque[tuple[float, int, float]] = deque(maxlen=POINTS_KEPT)
        """(time, cycle, loss) of the merged model."""
        self.lost: deque[tuple[float, str, int]] = deque(maxlen=POINTS_KEPT)
        """(time, reason, tokens) of incarnations that ended with open steps."""
        self.failures = Failures()
        self.newest = 0.0
        """Time of the newest line."""
        self._newest_merge: dict[int, dict[str, Any]] = {}
        self._repeats = Repeats()

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
        self._clock(time)
        lost = self.failures.tape(line)
        match kind:
            case "begun":
                self._state(self.coordinator, "training", time)
            case "recovered" | "term":
                self._came_back(line.get("since") or time, time)
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
                self._state(self._lane(line["island"]), "absent", time)
            case "resumed":
                lane = self._lane(line["island"])
                lane.gap = 0.0
                if lane.state == "absent":
                    self._state(lane, "training", time)
            case "left":
                self._left(line, time, lost)
            case "quarantined" | "released":
                state = "quarantined" if kind == "quarantined" else "training"
                self._state(self._lane(line["island"]), state, time)
            case "finished":
                for lane in (self.coordinator, *self.lanes.values()):
                    self._state(lane, "", time)
            case "alert":
                self.alerts.append((time, line["text"]))
        if kind not in ROUTINE:
            self.event(time, kind, str(line.get("island", "")), text_of(line, lost))

    def event(self, time: float, kind: str, island: str, text: str) -> None:
        """Note something that people look for."""
        self.events.append(Event(time, kind, island, text))

    def _joined(self, line: Mapping[str, Any], time: float) -> None:
        lane = self._lane(line["island"])
        if line["kind"] == "hello":
            return lane.hello(line)
        if lane.incarnation != line["incarnation"]:
            steps = (line.get("carried") or {}).get("steps", 0)
            self._away_since_gap(lane)
            self._state(lane, "joining", time)
            lane.incarnation, lane.steps = line["incarnation"], steps
            lane.counts, lane.adopted, lane.told = {}, {}, time
            self._nothing_out(lane, time)
        lane.tokens_per_step = line["tokens_per_step"]

    def _left(self, line: Mapping[str, Any], time: float, lost: int) -> None:
        lane = self._lane(line["island"])
        if lost:
            self.lost.append((time, line["reason"], lost))
            self.grid.add("lost_tokens", lane.row, time, lost)
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
                if not lane.out:
                    lane.out_since = time
                lane.out[fragment] = record.get("tick", -1)
            case "adopted":
                if record["step"]:
                    self.grid.add("adoptions", lane.row, time, 1)
                lane.adopted[fragment] = record.get("version", (1, 0))[1]
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
        self.versions[fragment] = version
        merge: dict[str, Any] = {
            **{"time": round(time, 2), "fragment": fragment, "version": version},
            **{"final": bool(line.get("final")), "share": round(line["share"], 3)},
            **{"tokens": tokens, "stale": stale},
        }
        self.merges.append(merge)
        self._newest_merge[fragment] = merge

    def _came_back(self, since: float, time: float) -> None:
        """Note that the coordinator was away since then."""
        lane = self.coordinator
        self._paint(lane, since)
        lane.state = "absent" if since else ""
        self._state(lane, "training", time)
        for other in self.lanes.values():
            # Whether it was away, too, its next line tells.
            other.gap = other.gap or since

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
        self.failures.metrics(line)
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
        lane.steps = line["step"]
        if steps > 0:
            self.grid.spread("tokens", row, told, time, steps * lane.tokens_per_step)
        for field in COUNTED:
            more = line[field] - lane.counts.get(field, 0.0)
            lane.counts[field] = line[field]
            if more > 0:
                self.grid.spread(field, row, told, time, more)
        for field in ("loss", "eval_loss"):
            self.grid.note(field, row, time, line[field])
        if lane.adopted and self.versions:
            behind = sum(self.versions.values()) - sum(lane.adopted.values())
            self.grid.note("lag", row, time, max(0.0, behind / len(self.versions)))
        lane.told = time

    def _measured(self, line: Mapping[str, Any], time: float) -> None:
        merge = self._newest_merge.get(line["fragment"])
        cosine = line["pairwise_cosine"]
        if merge and merge["version"] == line["version"] and cosine is not None:
            merge["pairwise_cosine"] = float(f"{cosine:.3g}")
        for field in COSINES:
            self.grid.note(field, COORDINATOR, time, line[field])

    def _machine(self, line: Mapping[str, Any], time: float) -> None:
        for field in MACHINE:
            self.grid.note(field, COORDINATOR, time, line[field])
        workers = sum(line["workers_memory_bytes"])
        self.grid.note("workers_memory_bytes", COORDINATOR, time, workers)

    def _clock(self, time: float) -> None:
        if self.grid.begin is None:
            self.grid.begin = time
        self.newest = max(self.newest, time)

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
    ) -> list[dict[str, Any]]:
        """Return the newest merges of [start, stop), the oldest first."""
        newest = itertools.takewhile(
            lambda merge: merge["time"] >= start, reversed(self.merges)
        )
        within = (merge for merge in newest if merge["time"] < stop)
        return list(itertools.islice(within, most))[::-1]
