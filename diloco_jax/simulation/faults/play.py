"""`diloco simulate faults`: play schedules, one or many, and report the invariants
that did not hold.

A schedule that fails is shortened, to fewer faults.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import shlex
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax.config import ConfigError
from diloco_jax.config.fields import AT_LEAST_1, NOT_NEGATIVE, check_bounds, setting
from diloco_jax.simulation.faults.draw import FAULTS, draw
from diloco_jax.simulation.faults.facts import ViolationError
from diloco_jax.simulation.faults.schedule import Schedule, from_json
from diloco_jax.simulation.faults.world import FaultyWorld

Progress = Callable[[float], None]
CYCLES = 3
"""Merges of every fragment, at least, in a schedule drawn from a seed."""
UNBROKEN = "unbroken"
"""Invariant that no process ends by an exception."""


class Played(NamedTuple):
    """Result of a schedule. wrong: None if everything held."""

    world: FaultyWorld
    wrong: ViolationError | None

    @property
    def is_full(self) -> bool:
        """True if enough faults struck and enough merges happened."""
        world = self.world
        return world.struck.total() >= FAULTS and min(world.merges) >= CYCLES


def play(schedule: Schedule) -> Played:
    """Play a schedule to its end, or to the first violation."""
    world = FaultyWorld(schedule)
    return _played(world, world.play)


def play_seed(seed: int) -> Played:
    """Play the schedule of a seed; extend the run if it was over too soon, to half of
    its first tokens more."""
    played = play(draw(seed))
    while not played.is_full and played.wrong is None:
        world = played.world
        assert world.coordinator is not None
        schedule, done = world.schedule, world.coordinator.state.progress_tokens
        total_tokens = done + max(1, schedule.total_tokens // 2)
        # So that the schedule plays the same again.
        extended_to = (*schedule.extended_to, total_tokens)
        world.schedule = replace(schedule, extended_to=extended_to)
        played = _played(world, functools.partial(world.extend, total_tokens))
    return played


def _played(world: FaultyWorld, go_on: Callable[[], None]) -> Played:
    """Play; return the violation at which it ended, if there is one."""
    try:
        go_on()
    except ViolationError as violation:
        return Played(world, violation)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{error!r} in {place.name}, {place.filename}:{place.lineno}"
        return Played(world, ViolationError(UNBROKEN, what))
    return Played(world, None)


def shortest(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Return the schedule with the fewest faults found that still fails."""
    size = len(schedule.faults)
    while size:
        start = 0
        while start < len(faults := schedule.faults):
            fewer = replace(schedule, faults=faults[:start] + faults[start + size :])
            if fails(fewer):
                schedule = fewer
            else:
                start += size
        size //= 2
    return schedule


@dataclasses.dataclass(kw_only=True)
class Violation:
    """A violation that a schedule found."""

    seed: int | None = None
    """None: the schedule was given."""
    invariant: str
    what: str
    shortest: Schedule | None = None
    """None if it was not shortened, since that was interrupted."""

    @property
    def command(self) -> str:
        """Command that repeats it, with the shortest schedule if there is one."""
        options = ["--seeds", "1", "--first-seed", str(self.seed)]
        if self.shortest is not None:
            options = ["--schedule", self.shortest.json()]
        return f"diloco simulate faults {shlex.join(options)}"

    def __str__(self) -> str:
        where = "schedule" if self.seed is None else f"seed {self.seed}"
        lines = [f"{where} violates {self.invariant}: {self.what}"]
        if self.shortest is not None:
            lines += [f"  shortest schedule found: {self.shortest.json()}"]
        return "\n".join([*lines, f"  again: {self.command}"])


Found = Callable[[Violation], None]
"""Callback for each violation as it is found."""


@dataclasses.dataclass(kw_only=True)
class FaultsReport:
    """Report on many schedules."""

    schedules: int = 0
    seconds: float = 0.0
    """Seconds without the time for shortening."""
    merges: int = 0
    crashes: int = 0
    """Crashes of islands and coordinators."""
    torn_snapshots: int = 0
    """Torn snapshots that a returning coordinator found and passed over."""
    extensions: int = 0
    """Times that a run was over, and went on to more tokens."""
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    """Faults that happened, by kind."""
    violations: list[Violation] = dataclasses.field(default_factory=list)
    next_seed: int | None = None
    """Seed at which to go on after an interruption; None at the end."""

    @property
    def schedules_per_minute(self) -> float:
        """Schedules per minute on one core."""
        return 60 * self.schedules / self.seconds if self.seconds else 0.0

    def json(self) -> dict[str, Any]:
        """Return the report as Python builtins."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for told, violation in zip(values["violations"], self.violations, strict=True):
            told["command"] = violation.command
        return {**values, "schedules_per_minute": self.schedules_per_minute}

    def __str__(self) -> str:
        """Describe it for people, at the end or at an interruption."""
        faults = ", ".join(f"{kind} {n}" for kind, n in sorted(self.faults.items()))
        summary = (
            f"{self.schedules} schedules in {self.seconds:.1f} s "
            f"({self.schedules_per_minute:.0f} a minute), {self.merges} merges, "
            f"{self.crashes} crashes, {self.torn_snapshots} torn snapshots, "
            f"{self.extensions} extensions, "
            f"{self.faults.total()} faults ({faults}): "
            f"{len(self.violations)} violations"
        )
        if self.next_seed is None:
            return summary
        return f"{summary}\nto go on: --first-seed {self.next_seed}"


def check(
    given: Sequence[int] | Schedule,
    progress: Progress = lambda share: None,
    found: Found = lambda violation: None,
    report: FaultsReport | None = None,
) -> FaultsReport:
    """Play the schedules of these seeds, and shorten those that violate an invariant;
    or play one schedule as it is.

    report: filled and returned; it holds the violations found so far if this is
    interrupted.
    """
    report = report or FaultsReport()
    if isinstance(given, Schedule):
        with _quiet():
            wrong = _count(report, functools.partial(play, given)).wrong
        if wrong is not None:
            found(_note(report, wrong, shortest=given))
        return report
    with _quiet():
        for index, seed in enumerate(given):
            report.next_seed = seed
            played = _count(report, functools.partial(play_seed, seed))
            report.next_seed = seed + 1
            if played.wrong is not None:
                violation = _note(report, played.wrong, seed=seed)
                try:
                    fails = functools.partial(_violates, violation.invariant)
                    violation.shortest = shortest(played.world.schedule, fails)
                finally:  # Without a shortest schedule if this is interrupted.
                    found(violation)
            progress((index + 1) / len(given))
    report.next_seed = None
    return report


def _note(report: FaultsReport, wrong: ViolationError, **facts: Any) -> Violation:
    violation = Violation(invariant=wrong.invariant, what=wrong.what, **facts)
    report.violations.append(violation)
    return violation


def _count(report: FaultsReport, playing: Callable[[], Played]) -> Played:
    """Play, and count what happened."""
    began = time.perf_counter()
    played = playing()
    gc.collect()
    report.seconds += time.perf_counter() - began
    world = played.world
    report.schedules += 1
    report.merges += sum(world.merges)
    report.crashes += world.crashes
    report.torn_snapshots += world.torn_snapshots
    report.extensions += world.extensions
    report.faults.update(world.struck)
    return played


def _violates(invariant: str, schedule: Schedule) -> bool:
    wrong = play(schedule).wrong
    return wrong is not None and wrong.invariant == invariant


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of torn logs and refused takes, which are the point here.

    The garbage collector is off, since most of what it would look at within a schedule
    is still in use; it never looks at the imported modules.
    """
    disabled, collects = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        gc.unfreeze()
        logging.disable(disabled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Play random schedules of faults against the protocol, islands, log and recovery
    of the product, and check invariants at every event. Exit code 1 if one fails.
    """

    seeds: int = setting(1000, AT_LEAST_1, help="Schedules, one of each seed.")
    first_seed: int = setting(
        0, NOT_NEGATIVE, help="The first seed; the others follow it."
    )
    schedule: str = setting(
        "", help="Play this one instead, as a violation printed it (JSON)."
    )

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        for field in ("seeds", "first_seed") if self.schedule else ():
            if (value := getattr(self, field)) != getattr(FaultsConfig, field):
                raise ConfigError(
                    f"--{field.replace('_', '-')} {value} with --schedule, which plays "
                    f"that one schedule; leave out one of them"
                )

    def given(self) -> Sequence[int] | Schedule:
        """Return what `check` is to play. Raises ConfigError."""
        self.validate()
        if self.schedule:
            return from_json(self.schedule)
        return range(self.first_seed, self.first_seed + self.seeds)
