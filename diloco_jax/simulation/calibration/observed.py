"""When things happened in a recorded run, by its coordinator's clock.

Times are unix seconds at which the coordinator wrote a line onto the tape, so an
island's are later than the island's own by what its report took.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator import notes
from diloco_jax.coordinator.roster import Roster
from diloco_jax.observability.tape import NOT_A_RECORD, TapeError, brief, read_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.reasons import STOPPED
from diloco_jax.protocol.values import Record, Version
from diloco_jax.simulation.replay.recording import read_begun, refuse_term
from diloco_jax.workdir import read_config, read_facts, read_summary

RUN_FIELDS = ("goodput", "compute_goodput", "uptime", "wall_seconds", "merges")
ISLAND_FIELDS = ("median_step_seconds", "steps", "tokens_merged", "participation")
"""What is predicted, of `summary.json`."""


class Adoption(NamedTuple):
    """A published version taken over at the boundary before `step`."""

    fragment: int
    version: Version
    step: int


class Merged(NamedTuple):
    """A merge and the takes in it: (island, incarnation, tick)."""

    at: float
    fragment: int
    version: Version
    tick: int
    takes: tuple[tuple[str, int, int], ...]
    seconds: float | None
    """From its order to its result; None if its line of metrics was lost in a crash."""


class Tick(NamedTuple):
    """When islands were asked for a fragment, and which."""

    at: float
    asked: tuple[str, ...]


@dataclasses.dataclass(kw_only=True)
class Observed:
    """One incarnation of an island."""

    incarnation: int
    hello_at: float
    joined_at: float
    began_at: float | None = None
    """Its first records: it is about to step."""
    boundaries: dict[int, float] = dataclasses.field(default_factory=dict)
    """By the step that follows."""
    takes: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    """Step by (fragment, tick)."""
    adoptions: list[Adoption] = dataclasses.field(default_factory=list)
    told_through: int = 0
    lost_at: float | None = None
    """When its connection broke, or its silence began, for the last time."""

    @property
    def join_s(self) -> float:
        """From its hello to its first step; 0 if it made none."""
        return (self.began_at or self.joined_at) - self.joined_at


class Compiled(NamedTuple):
    """A coordinator's first line, and when it had compiled what merges need: those that
    it orders between the two wait."""

    up_at: float
    at: float
    again: bool
    """It had recovered."""


class Recovered(NamedTuple):
    """A coordinator's outage: its last line, and the first one after it."""

    down_at: float
    up_at: float


@dataclasses.dataclass(kw_only=True)
class Timeline:
    """All of a finished run. `begun_at`: when its coordinator was first started;
    `stopped_s`: between ends of the whole run and its resumptions, in all."""

    workdir: Path
    config: Config
    begun_at: float
    stopped_s: float
    finished_at: float
    lives: Mapping[str, list[Observed]]
    """Incarnations in order, by island."""
    ticks: Mapping[int, Tick]
    merges: list[Merged]
    compiled: list[Compiled]
    """By the coordinator's lives, but those that ended earlier."""
    recoveries: list[Recovered]
    resumed_after_s: list[float]
    """From a coordinator's return to an island's."""
    roster: Roster
    summary: Mapping[str, Any]

    def first_joins(self) -> list[float]:
        """Seconds from the hello to the first step, of each island's first life."""
        return [own[0].join_s for own in self.lives.values() if own[0].began_at]

    def later_joins(self) -> list[float]:
        """The same, of their later lives."""
        later = [life for own in self.lives.values() for life in own[1:]]
        return [life.join_s for life in later if life.began_at]


def read_timeline(workdir: Path) -> Timeline:
    """What a finished run left in its workdir.

    Raises ConfigError naming what is missing, altered, of another version or not
    finished, and the remedy.
    """
    config = read_config(workdir)
    for name in (
        run_files.TAPE,
        run_files.METRICS,
        run_files.FACTS,
        run_files.ROSTER,
    ):
        if not (workdir / name).is_file():
            raise ConfigError(f"{workdir} has no {name}; give the workdir of a run")
    path = workdir / run_files.TAPE
    reader = _Reader(path, config, dict(_merge_seconds(workdir / run_files.METRICS)))
    try:
        for line, record in enumerate(read_tape(path), start=1):
            reader.read(line, record)
    except TapeError as error:
        raise ConfigError(f"{error}; calibrate on a tape as it was written") from error
    if reader.finished_at is None or not (workdir / run_files.SUMMARY).is_file():
        raise ConfigError(
            f"{path} ends after line {reader.line} without the end of the run "
            f"('finished'), or there is no summary.json beside it: it was cut off, or "
            f"the run is not over; calibrate on a run that has ended"
        )
    summary, facts = read_summary(workdir), read_facts(workdir)
    _check_summary(workdir / run_files.SUMMARY, summary)
    roster = Roster(workdir / run_files.ROSTER)
    for name in reader.lives:
        if name not in roster.members:
            raise ConfigError(
                f"{workdir / run_files.ROSTER} does not tell of island {name!r}, which "
                f"is on the tape (it has {', '.join(roster.members) or 'none'}); "
                f"restore it from a copy"
            )
    return Timeline(
        workdir=workdir,
        config=config,
        begun_at=facts.begun_unix - facts.stopped_seconds,
        stopped_s=facts.stopped_seconds,
        finished_at=reader.finished_at,
        lives=reader.lives,
        ticks=reader.ticks,
        merges=reader.merges,
        compiled=reader.compiled,
        recoveries=reader.recoveries,
        resumed_after_s=reader.resumed_after_s,
        roster=roster,
        summary=summary,
    )


def _check_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Raises ConfigError unless all is there that is read of it."""

    def require(where: str, section: Any, field: str) -> None:
        value = section.get(field) if isinstance(section, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"{path} is not what a run leaves ({where}{field} = {brief(value)}; it "
                f"must be a number); restore it from a copy"
            )

    for field in RUN_FIELDS:
        require("", summary, field)
    islands = summary.get("islands")
    if not isinstance(islands, Mapping):
        raise ConfigError(
            f"{path} is not what a run leaves (islands = {brief(islands)}; it must be "
            f"an object by name); restore it from a copy"
        )
    for name, island in islands.items():
        for field in ISLAND_FIELDS:
            require(f"islands.{name}.", island, field)


class _MergeLine(msgspec.Struct):
    fragment: int
    version: int
    seconds: float


def _merge_seconds(path: Path) -> Iterator[tuple[tuple[int, int], float]]:
    """By fragment and version."""
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text)
            if line["kind"] == "merge":
                merge = msgspec.convert(line, _MergeLine)
                yield (merge.fragment, merge.version), merge.seconds
        except (*NOT_A_RECORD, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a line of metrics ({brief(error)}); "
                f"calibrate on the workdir as the run left it"
            ) from error


class _Reader:
    def __init__(
        self, path: Path, config: Config, merge_seconds: Mapping[tuple[int, int], float]
    ) -> None:
        self.line = 0
        self.finished_at: float | None = None
        self.lives: dict[str, list[Observed]] = {}
        self.ticks: dict[int, Tick] = {}
        self.merges: list[Merged] = []
        self.compiled: list[Compiled] = []
        self.recoveries: list[Recovered] = []
        self.resumed_after_s: list[float] = []
        self._path, self._config = path, config
        self._merge_seconds = merge_seconds
        self._hello_at: dict[str, float] = {}
        self._last_at = self._up_at = 0.0
        self._again = False
        self._recoveries_before = 0

    def read(self, line: int, record: Mapping[str, Any]) -> None:
        """The next line. Raises TapeError if it cannot be one."""
        self.line = line
        try:
            at = msgspec.convert(record["time"], float)
            self._read(record, at)
            self._last_at = at
        except (KeyError, IndexError, TypeError, msgspec.ValidationError) as error:
            kind = brief(record.get("kind"))
            raise TapeError(
                f"{self._path}, line {line}: not a record {kind} ({brief(error)})"
            ) from error

    def _read(self, record: Mapping[str, Any], at: float) -> None:
        kind = record["kind"]
        refuse_term(self._path, record)
        if (self.line == 1) != (kind == "begun"):
            raise TapeError(
                f"{self._path}, line {self.line}: {brief(kind)}; 'begun' is the "
                f"first record and no other"
            )
        match kind:
            case "begun":
                read_begun(self._path, record, self._config)
                self._up_at, self._again = at, False
            case "compiled":
                self.compiled.append(Compiled(self._up_at, at, self._again))
            case "hello":
                self._hello_at[records.from_tape(record, notes.Hello).island] = at
            case "joined":
                joined = records.from_tape(record, records.Joined)
                life = Observed(
                    incarnation=joined.incarnation,
                    hello_at=self._hello_at[joined.island],
                    joined_at=at,
                )
                self.lives.setdefault(joined.island, []).append(life)
            case "absent":
                absent = records.from_tape(record, records.Absent)
                lease_s = self._config.placement.deadlines.lease_s
                silent_s = lease_s if absent.why == "silent" else 0.0
                self.lives[absent.island][-1].lost_at = at - silent_s
            case "left":
                left = records.from_tape(record, records.Left)
                if left.reason == STOPPED and not left.said:
                    # Somebody ended the run, and resumed it at leisure.
                    self.lives[left.island][-1].lost_at = None
                    self.recoveries = self.recoveries[: self._recoveries_before]
            case "resumed":
                if self.recoveries:
                    self.resumed_after_s.append(at - self.recoveries[-1].up_at)
            case "island":
                told = records.from_tape(record, records.Fact)
                self._told(self.lives[told.island][-1], told.record, at)
            case "tick":
                tick = records.from_tape(record, records.Tick)
                self.ticks[tick.tick] = Tick(at, tick.asked)
            case "merged":
                merged = records.from_tape(record, records.Merged)
                takes = tuple(
                    (c.island, c.incarnation, c.tick) for c in merged.contributions
                )
                fragment, version = merged.fragment, merged.version
                seconds = self._merge_seconds.get((fragment, version.number))
                self.merges.append(
                    Merged(at, fragment, version, merged.tick, takes, seconds)
                )
            case "recovered":
                self._recoveries_before = len(self.recoveries)
                self.recoveries.append(Recovered(self._last_at, at))
                self._up_at, self._again = at, True
            case "finished":
                self.finished_at = at

    def _told(self, life: Observed, record: Record, at: float) -> None:
        if record.seq <= life.told_through:
            return  # Said again to a coordinator that came back.
        life.told_through = record.seq
        step, fragment = record.step, record.fragment
        life.began_at = at if life.began_at is None else life.began_at
        life.boundaries.setdefault(step, at)
        if record.kind == "took":
            life.takes[fragment, record.tick] = step
        elif record.kind == "adopted" and step:
            life.adoptions.append(Adoption(fragment, record.version, step))
