"""Attendance of the islands of an emulation: starts, failures, leaving."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.roster import Roster
from diloco_jax.faults import Fault, parse_faults
from diloco_jax.process import crashes_in_a_row
from diloco_jax.protocol.values import lead_of
from diloco_jax.simulation.emulation.diary import Diary
from diloco_jax.simulation.emulation.options import EmulationOptions
from diloco_jax.simulation.virtual.island import IslandSpec
from diloco_jax.simulation.virtual.steps import durations
from diloco_jax.simulation.virtual.world import World

LIVES_IN_VAIN = 1000
"""Failures of machines in a row, of all islands together, without progress between
them. After this number the run would go on for ever.
"""


class Attendance:
    """Starts and ends of islands, as config and options say.

    A kill of `placement.faults` is a crash. `diloco run` restarts the island after at
    most `placement.restarts` crashes in a row; after one more it gives the island up. A
    random failure is one of the machine: when the machine is back, its launcher counts
    anew.

    bytes_up: bytes of an encoded delta, by fragment.
    """

    def __init__(
        self,
        config: Config,
        options: EmulationOptions,
        world: World,
        bytes_up: tuple[int, ...],
    ) -> None:
        self.diaries: dict[str, list[Diary]] = {n: [] for n in sorted(config.islands)}
        """Diaries of all incarnations, by island."""
        self._config, self._options, self._world = config, options, world
        self._clock, self._bytes_up = world.clock, bytes_up
        self._crashes: Counter[str] = Counter()
        """Crashes in a row since the island's machine was last started."""
        self._in_vain = self._progress_tokens = 0
        self._faults = parse_faults(config.placement.faults, config.islands).faults
        for name in self.diaries:
            start, stop = self._stay(name)
            self._clock.at(start, functools.partial(self._start, name))
            if stop < math.inf:
                self._clock.at(stop, functools.partial(self._leave, name))

    def update(self) -> None:
        """Bring the diaries of live incarnations up to date."""
        for name, diaries in self.diaries.items():
            for diary in diaries[-1:]:
                if diary.ended is None:
                    diary.steps = self._world.islands[name].steps

    def close(self) -> None:
        """Close all diaries at the end of the run."""
        for name in self.diaries:
            self._close(name, "finished")

    def roster(self) -> Roster:
        """Return the roster that a coordinator would hold by now."""
        self.update()
        roster = Roster()
        for name, diaries in self.diaries.items():
            for diary in diaries:
                now = self._clock.now if diary.ended is None else diary.ended
                roster.hello(diary, diary.began)
                roster.report(name, diary.measures(), (), now)
                roster.members[name].adopted = dict(diary.versions)
                if diary.end == "left":
                    roster.left(name, now)
        return roster

    @property
    def given_up(self) -> list[str]:
        """Islands with more crashes in a row than restarts."""
        restarts = self._config.placement.restarts
        return [name for name in self.diaries if self._crashes[name] > restarts]

    # ---- what happens ---------------------------------------------------------------

    def _stay(self, name: str) -> tuple[float, float]:
        return self._options.joins.get(name, (0.0, math.inf))

    def _start(self, name: str) -> None:
        if self._world.coordinator.finished or self._clock.now >= self._stay(name)[1]:
            return
        options, island = self._options, self._config.islands[name]
        incarnation = len(self.diaries[name]) + 1
        self.diaries[name].append(
            Diary(
                island=name,
                incarnation=incarnation,
                tokens_per_step=island.batch_size * self._config.run.sequence_length,
                began=self._clock.now,
                compile_seconds=options.join_seconds,
            )
        )
        chance = np.random.default_rng(
            (options.chance_seed, list(self.diaries).index(name), incarnation)
        )
        if options.failure_every_seconds:
            lasts_s = chance.exponential(options.failure_every_seconds)
            self._clock.after(lasts_s, functools.partial(self._fail, name, incarnation))
        seconds = durations(island.step_seconds, options.step_spread, chance)
        self._world.start(
            IslandSpec(
                name=name,
                batch_size=island.batch_size,
                step_seconds=functools.partial(self._step_seconds, name, seconds),
                join_seconds=options.join_seconds,
                bytes_up=self._bytes_up,
                lead=lead_of(island.hosts),
            )
        )

    def _step_seconds(self, name: str, usual: Iterator[float], step: int) -> float:
        """Return the seconds of a step that begins now; schedule a kill after it."""
        diary = self.diaries[name][-1]
        faults = [fault for fault in self._faults if _strikes(fault, diary)]
        pauses = [f.pause_s for f in faults if f.step == step and f.pause_s is not None]
        seconds = next(usual) + sum(pauses)
        if any(f.step == step + 1 and f.kills for f in faults):
            crash = functools.partial(self._crash, name, diary.incarnation)
            self._clock.after(seconds, crash)
        diary.step_seconds.append(seconds)
        return seconds

    def _fail(self, name: str, incarnation: int) -> None:
        """Take the island's machine away for a while."""
        if self._kill(name, incarnation):
            self._crashes[name] = 0
            self._clock.after(
                self._options.down_seconds, functools.partial(self._start, name)
            )
            self._require_progress()

    def _crash(self, name: str, incarnation: int) -> None:
        """End the island's process; see `cluster.processes` for how often it comes
        back.
        """
        if self._kill(name, incarnation):
            diary = self.diaries[name][-1]
            self._crashes[name] = crashes_in_a_row(
                self._crashes[name], self._clock.now - diary.began
            )
            if name not in self.given_up:
                again = functools.partial(self._start, name)
                self._clock.after(self._options.down_seconds, again)

    def _kill(self, name: str, incarnation: int) -> bool:
        """Kill this incarnation; return True if it still ran."""
        island = self._world.islands[name]
        if island.incarnation != incarnation or island.ended is not None:
            return False
        self._world.kill(name)
        self._close(name, "died")
        return True

    def _require_progress(self) -> None:
        tokens = self._world.coordinator.state.progress_tokens
        self._in_vain = self._in_vain + 1 if tokens == self._progress_tokens else 0
        self._progress_tokens = tokens
        if self._in_vain >= LIVES_IN_VAIN:
            raise ConfigError(
                f"failure_every_seconds = {self._options.failure_every_seconds:g}: the "
                f"last {LIVES_IN_VAIN} lives of islands brought no progress, and at "
                f"{self._clock.now:g} s the run has {tokens} of its "
                f"{self._config.run.total_tokens} tokens; raise it well above the "
                f"seconds of a join and of sync.steps_per_cycle steps"
            )

    def _leave(self, name: str) -> None:
        island = self._world.islands[name]
        if island.ended is None:
            island.leave("stopped")
            self._close(name, "left")

    def _close(self, name: str, why: str) -> None:
        self.update()
        for diary in self.diaries[name][-1:]:
            if diary.ended is None:
                diary.ended, diary.end = self._clock.now, why


def _strikes(fault: Fault, diary: Diary) -> bool:
    """Return True if the fault strikes this incarnation or one of its hosts."""
    return (fault.who, fault.incarnation) == (diary.island, diary.incarnation)
