"""A machine with a coordinator or its standby, in a world of faults.

The production halves of `protocol.standby` decide. A process that may not lead ends,
and starts again as the standby.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, cast, get_args

from diloco_jax.coordinator.standby.machine_thread import timing_of
from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.standby import following, primary
from diloco_jax.protocol.standby.events import (
    Accept,
    AnswerPrimary,
    Dial,
    DiskBroken,
    Dismiss,
    FromStore,
    HangUp,
    Lapse,
    MandateWritten,
    PrimaryEffect,
    PrimaryEvent,
    ReadMandate,
    RecordWritten,
    Reign,
    Release,
    Retire,
    RunFinished,
    StandbyEffect,
    StandbyEvent,
    StepDown,
    StoreSilent,
    TakeOver,
    WriteMandate,
)
from diloco_jax.protocol.standby.following import Standby
from diloco_jax.protocol.standby.primary_state import Primary
from diloco_jax.simulation.faults.schedule import LEASE_S, RESTART_S, RUN_ID
from diloco_jax.simulation.faults.standby_disk import FollowedDisk

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.gatherer import VirtualGatherer
    from diloco_jax.simulation.faults.seated import SeatedCoordinator
    from diloco_jax.simulation.faults.standby_line import FollowLine
    from diloco_jax.simulation.faults.standby_world import StandbyWorld
    from diloco_jax.simulation.virtual.clock import Due

TO_PRIMARY = frozenset(get_args(PrimaryEvent))
TO_STANDBY = frozenset(get_args(StandbyEvent))

Role = Literal["primary", "standby"]
"""Role in which a process is started."""


class Node:
    """One machine: its clock, its disk, and its process, if one runs."""

    def __init__(self, world: StandbyWorld, name: str, rate: float) -> None:
        """rate: seconds of its clock per second."""
        self.name, self.rate = name, rate
        self.timing = timing_of(Deadlines(LEASE_S))
        self.disk = FollowedDisk()
        self.machine: Primary | Standby | None = None
        self.life = 0
        self.role: Role = "standby"
        self.paused = False
        self.reaches_object = True
        self.late_s = 0.0
        """Seconds by which its requests and their answers are late."""
        self.coordinator: SeatedCoordinator | None = None
        self.gatherer: VirtualGatherer | None = None
        self.line: FollowLine | None = None
        self.written = 0
        """Number of the last record of this life."""
        self.retired = False
        """The run is over, and its process has ended for good."""
        self.forward_s = 0.0
        """Seconds by which its clock has jumped."""
        self._world = world
        self._waiting: list[Callable[[], None]] = []
        """Events that came while it is stopped."""
        self._alarm: Due | None = None
        self._stepped = 0.0
        self._by = ""
        self._clock_s = 0.0

    @property
    def phase(self) -> str:
        """State of its machine; empty without a process."""
        return "" if self.machine is None else self.machine.phase

    @property
    def reign(self) -> int:
        """Number of the reign in which it leads, or wants to."""
        return self.machine.reign if isinstance(self.machine, Primary) else 0

    @property
    def led(self) -> int:
        """Last reign in which it led workers on other machines, by its disk."""
        return 0

    @property
    def leads(self) -> bool:
        """True if its process has the part of the primary, and has won the mandate."""
        seated = isinstance(self.machine, Primary)
        return seated and self.phase not in ("seeking", "over")

    def clock(self) -> float:
        """Return the reading of a clock that never stops."""
        return self._world.clock.now * self.rate + self.forward_s

    # ---- its process ----------------------------------------------------------------

    def start(self, role: Role, clock_s: float) -> None:
        """Start a process. clock_s: reading of the clock of a coordinator in it."""
        self.life += 1
        self.retired = False
        self.role, self._by, self._clock_s = role, "", clock_s
        if role == "standby":
            self._world.worker_crashes.end_those_of(self.disk)
            self.machine = following.begin(
                self.timing, self.name, empty=self.disk.empty, led=self.led
            )
            self.give(Timer())
        elif self.disk.empty:
            self._end_soon()  # It refuses to lead without a state.
        else:
            self._seek()

    def _seek(self) -> None:
        life = self.life
        self.machine = primary.seek(
            self.timing, self.name, RUN_ID, str(life), led=self.led
        )
        self.written = 0
        self._world.clock.after(
            self.timing.valid_s, lambda: self.act(lambda: self._wait_no_longer(life))
        )
        self.give(Timer())

    def cede(self) -> bool:
        """Leave the run to the standby in step, since the disk is damaged, and end.
        Without one return False: a person mends the disk."""
        self.give(DiskBroken())
        machine, life = self.machine, self.life
        self.disk.damaged = isinstance(machine, Primary) and machine.cedes

        def end() -> None:
            if self.life == life:
                self._end_soon()

        if self.disk.damaged:
            self._world.clock.after(self.timing.valid_s, lambda: self.act(end))
        return self.disk.damaged

    def _wait_no_longer(self, life: int) -> None:
        if self.life == life and self.phase == "seeking":
            self._world.ended(self, self.role, RESTART_S)

    def _end_soon(self) -> None:
        self._world.ended(self, "standby", RESTART_S)

    def kill(self) -> None:
        """End the process without a word."""
        self.life += 1
        self.machine = None
        if self.coordinator is not None:
            self.coordinator.die()
        self.coordinator = self.gatherer = None
        self._waiting.clear()
        self.paused, self._by = False, ""
        self.hang_up()

    def finish(self) -> None:
        """Say in the mandate that the run is over, then end."""
        seated = isinstance(self.machine, Primary) and not self.machine.finished
        if seated and not self.paused:
            self.give(RunFinished())

    def _retire(self) -> None:
        self.kill()
        self.retired = True

    def hang_up(self) -> None:
        """End the stream to or from the other node."""
        line, self.line = self.line, None
        if line is not None:
            line.close()

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.paused = True

    def go_on(self, slept_s: float = 0.0) -> None:
        """Let a stopped process go on with what came meanwhile. slept_s: for which its
        machine slept."""
        self.paused = False
        if slept_s and self.coordinator is not None:
            self.coordinator.slept(slept_s)
        waiting, self._waiting = self._waiting, []
        life = self.life
        for act in waiting:
            if self.life == life:
                act()

    def act(self, act: Callable[[], None]) -> None:
        """Let the process do something now, or once it is no longer stopped."""
        if self.paused:
            self._waiting.append(act)
        else:
            act()

    # ---- its machine ----------------------------------------------------------------

    def give(self, event: PrimaryEvent | StandbyEvent) -> None:
        """Let the machine handle an event, if it is for its part."""
        self._stepped = self.clock()
        life = self.life
        effects: list[PrimaryEffect] | list[StandbyEffect]
        machine, kind = self.machine, type(event)
        if isinstance(machine, Primary) and kind in TO_PRIMARY:
            to_primary = cast(PrimaryEvent, event)
            self.machine, effects = primary.step(machine, to_primary, self._stepped)
        elif isinstance(machine, Standby) and kind in TO_STANDBY:
            to_standby = cast(StandbyEvent, event)
            self.machine, effects = following.step(machine, to_standby, self._stepped)
        else:
            return
        for effect in effects:
            if self.life == life:
                self._carry_out(effect)
        if self.life == life:
            if isinstance(event, MandateWritten) and self.coordinator is not None:
                self.coordinator.nudge()
            self._set_alarm()
            machine = self.machine
            if isinstance(machine, Primary) and machine.told_over:
                self._retire()

    def wrote(self) -> None:
        """Count a record that is durable on this disk."""
        self.written += 1
        self.give(RecordWritten(number=self.written))

    def may_show(self, number: int) -> bool:
        """Tell if what the records up to this one tell may be seen now."""
        machine = self.machine
        return isinstance(machine, Primary) and primary.may_show(
            machine, number, self.clock()
        )

    def _carry_out(self, effect: PrimaryEffect | StandbyEffect) -> None:
        world = self._world
        match effect:
            case ReadMandate() | WriteMandate():
                self._ask(effect)
            case Release():
                if self.coordinator is not None:
                    self.coordinator.nudge()
            case Accept():
                assert self.line is not None
                self.line.copy()
            case Dismiss() | HangUp():
                self.hang_up()
            case Reign(gathers=gathers):
                if gathers and self._by != "gathering":
                    self._end_soon()  # Its standby's part gathers.
                else:
                    world.reign(self, self._clock_s, gathers=gathers)
            case Lapse():
                if self.coordinator is not None:
                    self.coordinator.end_sessions()
            case StepDown():
                self._end_soon()
            case Dial():
                world.dial(self)
            case AnswerPrimary(number=number):
                if self.line is not None:
                    self.line.answer(number)
            case TakeOver(by=by):
                world.takeovers[by] += 1
                self._by = by
                if by == "gathering":
                    self.disk.clear()
                self.life += 1
                self._seek()
            case Retire():
                self._retire()

    def _ask(self, request: ReadMandate | WriteMandate) -> None:
        """Ask the object. Request or answer is lost while the object is away. A late
        request counts all the same, even after the end of the process."""
        world, life, answered = self._world, self.life, False
        way_s = world.schedule.latency_s + self.late_s

        def answer(event: FromStore) -> None:
            nonlocal answered
            if not answered and self.life == life:
                answered = True
                silent.cancel()
                self.give(event)

        def arrive() -> None:
            if self.reaches_object:
                found = world.carry_out(request)
                world.clock.after(way_s, functools.partial(come_back, found))

        def come_back(found: FromStore) -> None:
            if self.reaches_object:
                self.act(lambda: answer(found))

        world.clock.after(way_s, arrive)
        silent = world.clock.after(
            self.timing.renew_s, lambda: self.act(lambda: answer(StoreSilent()))
        )

    def _set_alarm(self) -> None:
        """Ring at the next deadline; too early does no harm."""
        match self.machine:
            case Primary():
                due = primary.next_deadline(self.machine, self._stepped)
            case Standby():
                due = following.next_deadline(self.machine, self._stepped)
            case _:
                return
        if due == math.inf:
            return
        clock = self._world.clock
        at = max((due - self.forward_s) / self.rate, clock.now) + 1e-6
        if self._alarm is not None:
            if self._alarm.call is not None and clock.now < self._alarm.at <= at:
                return
            self._alarm.cancel()
        self._alarm = clock.at(at, self._ring)

    def _ring(self) -> None:
        # Whoever set it: the next life may count on it.
        self._alarm, life = None, self.life
        self.act(lambda: self.give(Timer()) if self.life == life else None)
