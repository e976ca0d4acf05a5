"""Fits what the simulator has to know of a fleet to the timeline of a recorded run.

Step times are resampled from the tape (`steps.py`). Validation is not predicted. A
delay that ends in something an island does at its next step boundary
is known as an interval only, since the boundary before came too early: the fitted delay
is in as many of these intervals as any can be.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diloco_jax.config import ConfigError, IslandConfig, RunConfig
from diloco_jax.island.hosts.following import lead_of
from diloco_jax.simulation.calibration.observed import Observed, Timeline
from diloco_jax.simulation.calibration.steps import gaps_of, steps_of

LEAST_LATENCY_S = 0.001
"""A message never arrives at the boundary that caused it."""
OWN_SAMPLES = 20
"""An island's transfers go by its own samples if it has as many, else by all: it is a
slow one that was waited for now and then."""
EMULATED_WITHIN = 1.2
"""A step that takes less than so many emulated ones is emulated: its compute hides."""


class Fitted(NamedTuple):
    """Seconds, and between what `observed` observations of it lie; of none, `value` is
    a guess, after what else the tape tells."""

    value: float
    low: float
    high: float
    observed: int


def of_samples(samples: Sequence[float]) -> Fitted:
    """Their median, and the middle 90 %."""
    low, high = np.quantile(samples, (0.05, 0.95))
    return Fitted(statistics.median(samples), float(low), float(high), len(samples))


def of_samples_or(samples: Sequence[float], guess: Sequence[float]) -> Fitted:
    """Of the samples; of none, what is guessed instead."""
    return of_samples(samples) if samples else of_samples(guess)._replace(observed=0)


def of_intervals(intervals: Sequence[tuple[float, float]], near: float) -> Fitted:
    """The number nearest to `near` that is in as many of the half-open intervals (low,
    high] as any; it is between `low` and `high` then."""
    ends = sorted([(low, 1) for low, _ in intervals] + [(h, -1) for _, h in intervals])
    most = covering = 0
    best = (near, near)
    for (at, change), (following, _) in itertools.pairwise(ends):
        covering += change
        if covering > most and following > at:
            most, best = covering, (at, following)
    low, high = max(best[0], 0.0), max(best[1], 0.0)
    return Fitted(min(max(near, low), high), low, high, len(intervals))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """An island's steps. seconds: f64[n] from one boundary to the next."""

    island: IslandConfig
    seconds: np.ndarray
    held_up: int
    """Times between boundaries that are no steps, and left out."""

    @property
    def fitted(self) -> Fitted:
        """Of one step."""
        return of_samples(self.seconds.tolist())

    @property
    def emulated(self) -> bool:
        """Whether they take what they are told to, and no longer."""
        return self.fitted.value < EMULATED_WITHIN * self.island.step_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """By island; "" stands for islands that the run did not have."""

    run: RunConfig
    steps: Mapping[str, Steps]
    latency_s: Mapping[str, Fitted]
    """Of a control message."""
    up_s: Mapping[str, Fitted]
    """From a take to its arrival, a latency less."""
    down_s: Mapping[str, Fitted]
    """From the answer to a fetch to its arrival, a latency less."""
    start_s: Mapping[str, Fitted]
    """From the coordinator's start to the island's hello."""
    compile_s: Mapping[str, Fitted]
    """Of its first join, which does not count as provisioned."""
    join_s: Mapping[str, Fitted]
    """From the first hello to the first step."""
    rejoin_s: Mapping[str, Fitted]
    """Of later incarnations."""
    restart_s: Fitted
    """From an island's end to its next hello, without `placement.restart_delay_s`."""
    merge_s: Fitted
    """Of computing one."""
    compiled_s: Fitted
    """From the coordinator's start until it has compiled what merges need."""
    recompiled_s: Fitted
    """From its return, likewise."""
    outage_s: Fitted
    """Of a coordinator that is started again, likewise."""
    resume_s: Fitted
    """From its return to an island's."""
    leaving_s: float
    """From the end of the run to an island's goodbye."""
    closing_s: float
    """From the end of the run to its summary."""

    def step_seconds(self, name: str, run: RunConfig, island: IslandConfig) -> Steps:
        """What steps of an island of another run would take.

        Raises ConfigError if nothing on the tape tells.
        """
        floor, known = island.step_seconds, self.steps.get(name)
        if (
            known is not None
            and not known.emulated
            and self._same_work(known, run, island)
        ):
            share = island.batch_size / known.island.batch_size
            seconds = np.maximum(known.seconds * share, floor)
            return Steps(island=island, seconds=seconds, held_up=0)
        if not floor:
            raise ConfigError(
                f"islands.{name}.step_seconds = 0, and the tape does not tell what its "
                f"step takes ({self._why_not(name)}); give the seconds, as in "
                f"--islands.{name}.step-seconds 0.5"
            )
        over = self._over_emulated(name)
        return Steps(island=island, seconds=floor + over, held_up=0)

    def _same_work(self, known: Steps, run: RunConfig, island: IslandConfig) -> bool:
        before, now = map(_work_per_sequence, (known.island, island))
        models = (self.run.model, self.run.sequence_length)
        return before == now and models == (run.model, run.sequence_length)

    def _why_not(self, name: str) -> str:
        if name not in self.steps:
            return f"its islands are {', '.join(self.steps)}"
        if self.steps[name].emulated:
            return "there its step time is emulated, and hides the compute"
        return "there it had another model, sequence length or mesh"

    def _over_emulated(self, name: str) -> np.ndarray:
        """Seconds by which steps are longer than they are told to be."""
        known = [self.steps[name]] if name in self.steps else [*self.steps.values()]
        over = [s.seconds - s.island.step_seconds for s in known if s.emulated]
        return np.concatenate(over) if over else np.zeros(1)


def _work_per_sequence(island: IslandConfig) -> IslandConfig:
    """The island without what its speed does not follow from, and without its batch."""
    return dataclasses.replace(
        island, batch_size=1, step_seconds=0.0, stands_for="", topology=""
    )


def calibrate(timeline: Timeline) -> Calibration:
    """Raises ConfigError if an island made too few steps."""
    config, lives = timeline.config, timeline.lives
    names = [name for name in lives if name in config.islands]
    if not names:
        raise ConfigError(
            f"{timeline.workdir}/config.json has islands {', '.join(config.islands)}, "
            f"the tape beside it {', '.join(lives) or 'none'}; bring back the run's own"
        )
    steps = {name: _steps(timeline, name) for name in names}
    round_trip = _of_all(
        {n: _round_trips(timeline, lives[n]) for n in names}, 2 * LEAST_LATENCY_S
    )
    latency = {n: _half(round_trip[n]) for n in names}
    up = _by_island(_uploads(timeline), names, LEAST_LATENCY_S, OWN_SAMPLES)
    down = _of_all(
        {n: _downloads(timeline, lives[n], latency[n].value) for n in names},
        up[""].value,
    )
    joins = {name: [life.join_s for life in lives[name]] for name in names}
    first = {name: joins[name][:1] for name in names}
    later = {name: joins[name][1:] for name in names}
    compiled = {n: [timeline.roster.members[n].first_compile_seconds] for n in names}
    started = {n: [lives[n][0].hello_at - timeline.begun_at] for n in names}
    delay_s = config.placement.restart_delay_s
    restarts = [s - delay_s for n in names for s in _restarts(lives[n])]
    outages = [r.up_at - r.down_at - delay_s for r in timeline.recoveries]
    begins = _pooled(started)
    leaving = [
        max(0.0, timeline.roster.members[name].last_seen - timeline.finished_at)
        for name in names
    ]
    compiling = [c.at - timeline.begun_at for c in timeline.compiled if not c.again]
    again = [c.at - c.up_at for c in timeline.compiled if c.again]
    recompiling = [s * _warmth(joins.values()) for s in compiling]
    summed_up_at = (
        timeline.begun_at + timeline.stopped_s + timeline.summary["wall_seconds"]
    )
    return Calibration(
        run=config.run,
        steps=steps,
        latency_s={**latency, "": _half(round_trip[""])},
        up_s=up,
        down_s=down,
        start_s=_by_island(started, names, 0.0),
        compile_s=_by_island(compiled, names, 0.0),
        join_s=_by_island(first, names, 0.0),
        rejoin_s=_rejoins(first, later, names),
        restart_s=of_samples_or(_not_negative(restarts), _not_negative(begins)),
        merge_s=of_samples_or(_merges(timeline), [0.0]),
        compiled_s=of_samples_or(_not_negative(compiling), [0.0]),
        recompiled_s=of_samples_or(again, _not_negative(recompiling) or [0.0]),
        outage_s=of_samples_or(_not_negative(outages), _not_negative(begins)),
        resume_s=of_samples_or(timeline.resumed_after_s, [0.0]),
        leaving_s=statistics.fmean(leaving),
        closing_s=max(0.0, summed_up_at - timeline.finished_at),
    )


# ---- one kind of number each -----------------------------------------------------


def _steps(timeline: Timeline, name: str) -> Steps:
    lives = [gaps_of(life) for life in timeline.lives[name]]
    count = sum(int(np.sum(gaps.steps)) for gaps in lives)
    if count < 3:
        raise ConfigError(
            f"{timeline.workdir}/tape.jsonl tells of {count} steps of island "
            f"{name!r}; calibrate on a run in which every island makes many"
        )
    sums = timeline.roster.measures(name)
    seconds = steps_of(
        lives,
        median=sums.median_step_seconds,
        # Validation makes gaps longer, but no step.
        spread=not sums.eval_seconds,
    )
    return Steps(
        island=timeline.config.islands[name],
        seconds=seconds,
        held_up=count - len(seconds),
    )


def _round_trips(
    timeline: Timeline, lives: Iterable[Observed]
) -> list[tuple[float, float]]:
    """A request goes down and a record comes up between a tick and what is told of the
    take; the boundary before the take was too early. Nothing is known of them where
    islands of several hosts are: there, takes come some boundaries later."""
    if any(lead_of(island.hosts) for island in timeline.config.islands.values()):
        return []
    return [
        (before - tick.at, taken - tick.at)
        for life in lives
        for (_, number), step in life.takes.items()
        if (tick := timeline.ticks.get(number)) is not None
        and (before := life.boundaries.get(step - 1)) is not None
        and (taken := life.boundaries[step]) > tick.at
    ]


def _merges(timeline: Timeline) -> list[float]:
    """What computing one took, compiling apart."""
    return [
        merge.seconds
        for merge in timeline.merges
        if merge.seconds is not None
        and not any(
            c.up_at <= merge.at - merge.seconds < c.at for c in timeline.compiled
        )
    ]


def _half(round_trip: Fitted) -> Fitted:
    low, value, high = (
        max(seconds / 2, LEAST_LATENCY_S)
        for seconds in (round_trip.low, round_trip.value, round_trip.high)
    )
    return round_trip._replace(value=value, low=low, high=high)


def _uploads(timeline: Timeline) -> dict[str, list[float]]:
    """Of the last island that was waited for, by island: from its record to the merge,
    without its computation."""
    found: dict[str, list[float]] = {}
    lives = {(n, o.incarnation): o for n, own in timeline.lives.items() for o in own}
    for merge in timeline.merges:
        tick = timeline.ticks.get(merge.tick)
        answered = {island for island, _, number in merge.takes if number == merge.tick}
        if tick is None or not answered.issuperset(tick.asked):
            continue  # It closed by its grace window.
        if merge.seconds is None:
            continue
        told = []
        for island, incarnation, number in merge.takes:
            life = lives[island, incarnation]
            step = life.takes.get((merge.fragment, number))
            if step is not None:
                told.append((life.boundaries[step], island))
        if told:
            at, island = max(told)
            waited_s = merge.at - at - merge.seconds
            found.setdefault(island, []).append(max(waited_s, 0.0))
    return found


def _downloads(
    timeline: Timeline, lives: Iterable[Observed], latency_s: float
) -> list[tuple[float, float]]:
    """Between a merge and what is told of its adoption, a publish comes down, a request
    goes up, the bytes come down and a record goes up: four latencies and the bytes."""
    published = {(m.fragment, m.version): m.at for m in timeline.merges}
    messages_s = 4 * latency_s
    return [
        (before - at - messages_s, adopted - at - messages_s)
        for life in lives
        for fragment, version, step in life.adoptions
        if (at := published.get((fragment, version))) is not None
        and (before := life.boundaries.get(step - 1)) is not None
        and (adopted := life.boundaries[step]) > at + messages_s
    ]


def _rejoins(
    first: Mapping[str, Sequence[float]],
    later: Mapping[str, Sequence[float]],
    names: Sequence[str],
) -> dict[str, Fitted]:
    if any(later.values()):
        return _by_island(later, names, 0.0)
    guesses = _by_island(first, names, 0.0)
    return {name: guess._replace(observed=0) for name, guess in guesses.items()}


def _warmth(joins: Iterable[Sequence[float]]) -> float:
    """How long a later join takes, in first joins of the island, at most 1: the later
    ones find in the cache what was compiled for the first. 1 if none came back."""
    ratios = [
        statistics.fmean(own[1:]) / own[0] for own in joins if own[1:] and own[0] > 0
    ]
    return min(1.0, statistics.median(ratios)) if ratios else 1.0


def _not_negative(seconds: Sequence[float]) -> list[float]:
    return [max(s, 0.0) for s in seconds]


def _restarts(lives: Sequence[Observed]) -> Iterator[float]:
    for before, after in itertools.pairwise(lives):
        if before.lost_at is not None:
            yield after.hello_at - before.lost_at


def _pooled(samples: Mapping[str, Sequence[float]]) -> list[float]:
    return [sample for own in samples.values() for sample in own]


def _by_island(
    samples: Mapping[str, Sequence[float]],
    names: Iterable[str],
    otherwise: float,
    least: int = 1,
) -> dict[str, Fitted]:
    """Of an island's own samples, or of all if it has fewer than `least`."""
    pool = of_samples_or(_pooled(samples), [otherwise])
    enough = {n for n in names if len(samples.get(n, ())) >= least}
    return {
        **{n: of_samples(samples[n]) if n in enough else pool for n in names},
        "": pool,
    }


def _of_all(
    intervals: Mapping[str, Sequence[tuple[float, float]]], near: float
) -> dict[str, Fitted]:
    """Of each island's intervals; where they leave much open, near to what the others'
    tell, or else to `near`."""
    alone = [of_intervals(own, near) for own in intervals.values()]
    told = [one.value for one in alone if one.high - one.low < one.value]
    if told:
        near = statistics.median(told)
    return {
        **{name: of_intervals(own, near) for name, own in intervals.items()},
        "": of_samples_or(told, [near]),
    }
