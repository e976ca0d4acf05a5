"""Fit the simulator's numbers for a fleet to the files of a finished run.

Islands measured their steps and lives themselves (`roster.msgpack`). The other numbers
come from the tape; its times are those at which the coordinator wrote a line.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, IslandConfig, RunConfig
from diloco_jax.coordinator.roster import Roster
from diloco_jax.observability.tape import Report, TapeError
from diloco_jax.protocol import records
from diloco_jax.simulation.replay.recording import read_begun, read_records
from diloco_jax.workdir import read_config, read_facts, read_summary

EMULATED_WITHIN = 1.2
"""Emulated steps. A step that is shorter than so many of them hides its compute."""
OWN_TRANSFERS = 20
"""Transfers that an island needs for a fit of its own. With fewer, which are its slow
ones, it gets the fit of all islands.
"""
LEAST_S = 1e-3


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Seconds, with the range of `observed` observations; 0 observed: a guess."""

    value: float
    low: float
    high: float
    observed: int


def fit(samples: Sequence[float], guess: float = 0.0) -> Fitted:
    """Take the median and the middle 90 %; without samples, the guess."""
    if not samples:
        return Fitted(guess, guess, guess, 0)
    low, high = np.quantile(samples, (0.05, 0.95))
    return Fitted(statistics.median(samples), float(low), float(high), len(samples))


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps of an island: a shortest step and an exponential tail.

    No step is shorter than `median - tail * ln 2`; the rest is drawn.
    """

    median: float
    tail: float
    """Mean of the drawn rest, in seconds."""

    def draw(self, chance: np.random.Generator) -> Iterator[float]:
        """Yield the seconds of one step after the other."""
        shortest = self.median - self.tail * math.log(2)
        while True:
            yield shortest + chance.exponential(self.tail)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fleet and coordinator of a finished run, in seconds.

    In numbers by island, "" stands for islands that the run did not have.
    """

    config: Config
    summary: Mapping[str, Any]
    steps: Mapping[str, Steps]
    start_s: Mapping[str, Fitted]
    """Seconds from the coordinator's start to the island's hello."""
    join_s: Mapping[str, Fitted]
    """Seconds from the first hello to the first step."""
    compile_s: Mapping[str, Fitted]
    """Part of `join_s` that does not count as provisioned."""
    transfer_s: Mapping[str, Fitted]
    """Seconds from a take to its merge, computing included."""
    away_s: Fitted
    """Seconds from the last step of an incarnation to the next one's first step,
    without `placement.restart_delay_s`.
    """
    outage_s: Fitted
    """Seconds from a coordinator's last line to its return, without that delay."""

    def of(self, what: str, name: str) -> float:
        """Return an island's seconds, by the field's name."""
        of_all: Mapping[str, Fitted] = getattr(self, what)
        return of_all.get(name, of_all[""]).value

    def fitted(self) -> Iterator[tuple[str, Fitted]]:
        """Yield every fitted number with its name."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Fitted):
                yield field.name, value
            elif field.name.endswith("_s"):
                for name in self.steps:
                    yield f"{name}: {field.name}", value.get(name, value[""])

    def steps_of(self, name: str, run: RunConfig, island: IslandConfig) -> Steps:
        """Return the steps that an island of another run would make.

        Raises ConfigError if the recorded run does not tell.
        """
        known, was = self.steps.get(name), self.config.islands.get(name)
        # Seconds that emulated steps took on top: in the median, and the tail.
        emulated = {
            n: (steps.median - self.config.islands[n].step_seconds, steps.tail)
            for n, steps in self.steps.items()
            if steps.median < EMULATED_WITHIN * self.config.islands[n].step_seconds
        }
        alike = was and _work(run, island) == _work(self.config.run, was)
        if known and was and alike and name not in emulated:
            share = island.batch_size / was.batch_size
            median = max(known.median * share, island.step_seconds)
            return Steps(median, known.tail * share)
        if not island.step_seconds:
            raise ConfigError(
                f"islands.{name}.step_seconds = 0, and the recorded run does not tell "
                f"what its step takes: {', '.join(self.steps)} made steps there, with "
                f"their models and meshes, and emulated ones hide the compute; give "
                f"the seconds, as in --islands.{name}.step-seconds 0.5"
            )
        over = [emulated[n] for n in ([name] if known else emulated) if n in emulated]
        more, tail = map(statistics.fmean, zip(*(over or [(0.0, 0.0)]), strict=True))
        return Steps(island.step_seconds + more, tail)


def _work(run: RunConfig, island: IslandConfig) -> tuple[Any, ...]:
    """Return the settings on which the seconds of one sequence depend."""
    alike = dataclasses.replace(
        island, batch_size=1, step_seconds=0.0, stands_for="", topology="", offers=""
    )
    return run.model, run.sequence_length, alike


def calibrate(workdir: Path, report: Report = lambda share: None) -> Calibration:
    """Fit all numbers to the files that a finished run left in its workdir. report:
    told the share of the tape that is read.

    Raises ConfigError naming what is missing, altered, of another version or not
    finished, and the remedy.
    """
    # Only its numbers are used.
    config = read_config(workdir, trust_code=True)
    for name in (run_files.TAPE, run_files.FACTS, run_files.ROSTER):
        if not (workdir / name).is_file():
            raise ConfigError(f"{workdir} has no {name}; give the workdir of a run")
    facts, summary = read_facts(workdir), read_summary(workdir)
    tape = _Tape(workdir / run_files.TAPE, config, report)
    if not (tape.finished_at and summary):
        raise ConfigError(
            f"{workdir / run_files.TAPE} lacks the end of the run ('finished'), "
            f"or there is no summary.json beside it; calibrate on a run that has ended"
        )
    roster = Roster(workdir / run_files.ROSTER)
    members = {
        name: member
        for name, member in roster.members.items()
        if name in config.islands and roster.measures(name).steps
    }
    if not members:
        raise ConfigError(
            f"{workdir / run_files.ROSTER} tells of no step of "
            f"{', '.join(config.islands)}; calibrate on a run whose islands made "
            f"many, with the config.json that it left"
        )
    active = {n: roster.measure(n, 0, 0, tape.finished_at).active for n in members}
    delay_s = config.placement.restart_delay_s
    # If the run was stopped, both have moved on.
    starts = {n: [m.first_seen - facts.begun_unix] for n, m in members.items()}
    joins = {n: [active[n][0][0] - m.first_seen] for n, m in members.items()}
    again_s = fit(_pooled(starts)).value + fit(_pooled(joins)).value
    away = {
        n: [later - end - delay_s for (_, end), (later, _) in itertools.pairwise(own)]
        for n, own in active.items()
    }
    # If the run was stopped, an outage may be the time until it went on.
    outages = [] if facts.stopped_seconds else tape.outages
    compiles = {n: [m.first_compile_seconds] for n, m in members.items()}
    return Calibration(
        config=config,
        summary=summary,
        steps={name: _steps(roster, name) for name in members},
        start_s=_by_island(starts),
        join_s=_by_island(joins),
        compile_s=_by_island(compiles),
        transfer_s=_by_island(tape.transfers, least=OWN_TRANSFERS),
        away_s=fit(_pooled(away), again_s),
        outage_s=fit([max(s - delay_s, 0.0) for s in outages], again_s),
    )


def _steps(roster: Roster, name: str) -> Steps:
    """Return the median that the island measured, and a tail that gives its mean."""
    measures = roster.measures(name)
    mean = (measures.step_seconds_total + measures.stalled_seconds) / measures.steps
    median = measures.median_step_seconds
    tail = max(0.0, mean - median) / (1 - math.log(2))
    return Steps(median, min(tail, median))


def _pooled(samples: Mapping[str, Sequence[float]]) -> list[float]:
    return [max(s, 0.0) for own in samples.values() for s in own]


def _by_island(
    samples: Mapping[str, Sequence[float]], least: int = 1
) -> dict[str, Fitted]:
    """Fit an island's own samples; if it has fewer than `least`, those of all."""
    everybody = fit(_pooled(samples), LEAST_S)
    own = {n: _pooled({n: s}) for n, s in samples.items() if len(s) >= least}
    alone = {name: fit(seconds) for name, seconds in own.items()}
    return {**dict.fromkeys(("", *samples), everybody), **alone}


class _Tape:
    """Times that only the tape has, in seconds.

    outages: from the coordinator's last line until it had compiled its merges again.
    transfers: by island, from the last take that a merge waited for to the merge.
    """

    def __init__(self, path: Path, config: Config, report: Report) -> None:
        """Raise ConfigError if the tape cannot be read."""
        self.finished_at = 0.0
        self.outages: list[float] = []
        self.transfers: dict[str, list[float]] = {}
        self._asked: dict[int, tuple[str, ...]] = {}
        self._took_at: dict[tuple[str, int, int], float] = {}
        """Times of takes by island, fragment and tick."""
        self._path, self._config = path, config
        self._at, self._down_at = 0.0, math.nan
        try:
            read_records(path, self._read, report)
        except TapeError as error:
            raise ConfigError(
                f"{error}; calibrate on a tape as it was written"
            ) from error

    def _read(self, line: int, record: Mapping[str, Any]) -> None:
        last_at, self._at = self._at, msgspec.convert(record["time"], float)
        at = self._at
        match record["kind"]:
            case "begun":
                read_begun(self._path, record, self._config)
            case "recovered":
                self._down_at = last_at
            case "compiled" if not math.isnan(self._down_at):
                self.outages.append(at - self._down_at)
            case "finished":
                self.finished_at = at
            case "tick":
                tick = records.from_tape(record, records.Tick)
                self._asked[tick.tick] = tick.asked
            case "island":
                fact = records.from_tape(record, records.Fact)
                if fact.record.kind == "took":
                    key = fact.island, fact.record.fragment, fact.record.tick
                    self._took_at.setdefault(key, at)
            case "merged":
                merged = records.from_tape(record, records.Merged)
                own = [(c.island, c.tick) for c in merged.contributions]
                answered = {island for island, tick in own if tick == merged.tick}
                if not answered.issuperset(self._asked.get(merged.tick, ("",))):
                    return  # Its grace window closed it.
                last_at, island = max(
                    (self._took_at.get((island, merged.fragment, tick), 0.0), island)
                    for island, tick in own
                )
                self.transfers.setdefault(island, []).append(at - last_at)
