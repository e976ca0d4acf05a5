"""Two coordinators, the object of the mandate and the lines between them, in virtual
time: random delays, losses, pauses, partitions, crashes and clocks that differ.

A record stands for whatever the coordinator makes durable. Once it is visible, islands
have adopted what it tells. A gathering finds all that is visible on islands.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from standby_parts import BrokenError, Line, Node, Plant

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.standby import events, following, primary
from diloco_jax.protocol.standby.mandate import NO_GENERATION, Mandate

TIMEOUT_S = 1.0
"""Time after which a request to the object counts as unanswered."""
LOAD_S = 3.0
"""Time in which a coordinator reads its disk, if that is not drawn."""


class World:
    """One schedule. `run` raises BrokenError."""

    def __init__(self, seed: int, plant: Plant, *, rough: bool = True) -> None:
        self.random, self.plant, self.rough = random.Random(seed), plant, rough
        self.now = 0.0
        self.generation = 0
        self.mandate: Mandate | None = None
        self.visible: list[int] = []
        self.led: list[tuple[float, str, str]] = []
        """When which node began to lead, and how."""
        self.cut: set[str] = set()
        """Ways that are cut: "line", or a node's name: from it to the store."""
        self.lapsed: list[str] = []
        self.alarms: dict[str, float] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._records = itertools.count(), itertools.count(1)
        drift = 0.02 if rough else 0.0
        self.nodes = {
            name: Node(name, 1 + self.random.uniform(-drift, drift)) for name in "AB"
        }
        self.nodes["A"].empty = False

    # ---- time --------------------------------------------------------------------

    def at(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), do))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self._queue)
            do()
            self._check_in_step()
        self.now = until

    def clock(self, node: Node) -> float:
        return self.now * node.rate

    # ---- what nodes do -----------------------------------------------------------

    def start(self, name: str, role: str) -> None:
        node = self.nodes[name]
        if node.machine is not None:
            return
        if role == "primary" and not node.empty:
            self._seek(node)
            return
        # Without a run, a coordinator refuses to lead.
        node.life += 1
        empty = node.empty and self.plant.notices_loss
        node.machine = following.begin(self.plant.standby, name, empty=empty)
        self._give(node, Timer())

    def _seek(self, node: Node) -> None:
        node.life, node.has_state = node.life + 1, False
        node.machine = primary.seek(
            self.plant.primary, node.name, "run", str(node.life)
        )
        node.first = len(node.disk)
        self._write_records(node, node.life)
        self._give(node, Timer())

    def crash(self, name: str, *, disk_lost: bool = False) -> None:
        node = self.nodes[name]
        node.machine, node.life = None, node.life + 1
        node.has_state = False
        node.inbox.clear()
        self._hang_up(node)
        if disk_lost:
            node.disk, node.empty, node.lost = [], True, True

    def pause(self, name: str, seconds: float) -> None:
        node = self.nodes[name]
        node.paused_until = max(node.paused_until, self.now + seconds)
        self.at(seconds, lambda: self._wake(node))

    def _wake(self, node: Node) -> None:
        if self.now < node.paused_until:
            return
        waiting, node.inbox = node.inbox, []
        for life, event in waiting:
            if life == node.life:
                self._give(node, event)

    def _give(self, node: Node, event: Any) -> None:
        """Let a node handle an event, unless it is paused; then later."""
        if self.now < node.paused_until:
            node.inbox.append((node.life, event))
            return
        if node.machine is None:
            return
        life, effects = node.life, list[Any]()
        if isinstance(node.machine, primary.Primary):
            if isinstance(event, events.PrimaryEvent):
                node.machine, effects = primary.step(
                    node.machine, event, self.clock(node)
                )
        elif isinstance(event, events.StandbyEvent):
            node.machine, effects = following.step(
                node.machine, event, self.clock(node)
            )
        for effect in effects:
            if node.life != life:
                return
            self._act(node, effect)
        if node.life == life:
            self._set_alarm(node)

    def _set_alarm(self, node: Node) -> None:
        machine = node.machine
        module = primary if isinstance(machine, primary.Primary) else following
        due = module.next_deadline(machine, self.clock(node))  # type: ignore
        if due == math.inf:
            return
        at, life = due / node.rate, node.life
        key = f"{node.name}{life}"
        if self.now < self.alarms.get(key, -math.inf) <= at:
            return
        self.alarms[key] = at

        def ring() -> None:
            if node.life == life:
                self.alarms.pop(key, None)
                self._give(node, Timer())

        self.at(max(at - self.now, 0.0) + 1e-6, ring)

    def _write_records(self, node: Node, life: int) -> None:
        """A primary makes records as long as it lives."""
        machine = node.machine
        if node.life != life or not isinstance(machine, primary.Primary):
            return
        leads = machine.phase not in ("seeking", "over") and node.has_state
        awake = self.now >= node.paused_until
        if leads and awake and not node.full and len(node.disk) < 400:
            record = next(self._records)
            node.disk.append(record)
            number = len(node.disk) - node.first
            if node.line is not None:
                self.send(node, ("record", number, record))
            self._give(node, events.RecordWritten(number=number))
        self.at(self.random.expovariate(2.0), lambda: self._write_records(node, life))

    # ---- effects -----------------------------------------------------------------

    def _act(self, node: Node, effect: Any) -> None:
        match effect:
            case events.ReadMandate() | events.WriteMandate():
                self._ask_store(node, effect)
            case events.Release(through=through):
                self._show(node, node.disk[: node.first + through])
            case events.Accept():
                number = len(node.disk) - node.first
                self.send(node, ("copy", number, list(node.disk)))
            case events.Dismiss() | events.HangUp():
                self._hang_up(node)
            case events.Reign(gathers=gathers):
                self.led.append((self.now, node.name, "seat"))
                if gathers:
                    self._gather(node)
                    return
                self._load(node)
                if missing := set(self.visible) - set(node.disk):
                    raise BrokenError(f"{node.name} leads without {missing}")
            case events.Lapse():
                self.lapsed.append(node.name)
            case events.StepDown() | events.Retire():
                self.crash(node.name)
            case events.Dial():
                self._dial(node)
            case events.AnswerPrimary(number=number):
                ahead = self.plant.answers_ahead if number >= 0 else 0
                self.send(node, ("answer", number + ahead))
            case events.TakeOver(by=by):
                self._take_over(node, by)

    def _show(self, node: Node, records: list[int]) -> None:
        holder = self.mandate.holder if self.mandate else ""
        if holder != node.name:
            raise BrokenError(f"{node.name} merges, and {holder} holds the mandate")
        known = set(self.visible)
        self.visible += [record for record in records if record not in known]

    def _check_in_step(self) -> None:
        if self.mandate is None or not self.mandate.in_step:
            return
        standby = self.nodes[self.mandate.in_step]
        if standby.lost:
            return
        if missing := set(self.visible) - set(standby.disk):
            raise BrokenError(f"{standby.name} is in step without {missing}")

    def _take_over(self, node: Node, by: str) -> None:
        self.led.append((self.now, node.name, by))
        if by == "log" and (missing := set(self.visible) - set(node.disk)):
            raise BrokenError(f"{node.name} goes on from its log without {missing}")
        if by == "gathering":
            node.disk, node.empty = [], True
        self._seek(node)

    def _load(self, node: Node) -> None:
        """Read the disk, which takes a while."""
        life = node.life

        def loaded() -> None:
            if node.life == life:
                node.has_state = True
                self._give(node, events.StateLoaded())

        self.at(self.random.uniform(0, 8) if self.rough else LOAD_S, loaded)

    def _gather(self, node: Node) -> None:
        """Ask islands, which takes a while, and begin a term with what they have."""
        life = node.life

        def begin() -> None:
            if node.life != life:
                return
            node.disk = [*self.visible, next(self._records)]
            node.first, node.has_state = len(node.disk), True
            node.empty = node.lost = False
            self._give(node, events.StateGathered())

        self.at(self.random.uniform(1, 10) if self.rough else 3.0, begin)

    # ---- the line ----------------------------------------------------------------

    def _dial(self, node: Node) -> None:
        other = self.nodes["B" if node.name == "A" else "A"]
        life = node.life

        def arrive() -> None:
            accepts = isinstance(other.machine, primary.Primary)
            paused = self.now < other.paused_until
            if "line" in self.cut or not accepts or paused or node.life != life:
                self.at(0.5, lambda: node.life == life and lose())  # type: ignore
                return
            line = Line((node.name, other.name))
            self._hang_up(other)
            node.line = other.line = line
            self._give(other, events.StandbyAttached(node=node.name))

        def lose() -> None:
            self._give(node, events.PrimaryLost())

        self.at(self._delay(), arrive)

    def send(self, node: Node, message: tuple[Any, ...]) -> None:
        line = node.line
        if line is None or not line.open:
            return
        (peer,) = set(line.ends) - {node.name}
        at = max(line.last.get(node.name, 0.0), self.now + self._delay())
        line.last[node.name] = at
        other, life = self.nodes[peer], self.nodes[peer].life

        def arrive() -> None:
            if not line.open or other.life != life or other.line is not line:
                return
            if "line" in self.cut:
                # Nothing that was sent before a cut comes after it.
                self._hang_up(node)
                return
            self._arrived(other, message, line)

        self.at(at - self.now, arrive)

    def _arrived(self, node: Node, message: tuple[Any, ...], line: Line) -> None:
        if self.now < node.paused_until:
            again = node.paused_until - self.now + 1e-3
            self.at(again, lambda: line.open and self._arrived(node, message, line))
            return
        standby = isinstance(node.machine, following.Standby)
        match message:
            case "copy", number, disk if standby:
                node.disk, node.empty = [], True
                self._give(node, events.Following())
                if self._has_room(node):
                    node.disk = [] if node.full else list(disk)
                    node.empty = node.lost = False
                    self._give(node, events.Copied(number=number))
            case "record", number, record if standby and self._has_room(node):
                if not node.full:
                    node.disk.append(record)
                self._give(node, events.PrimaryHeard(number=number))
            case "alive", number if standby:
                self._give(node, events.PrimaryHeard(number=number))
            case ("answer", number):
                self._give(node, events.StandbyAnswered(number=number))

    def _has_room(self, node: Node) -> bool:
        """Tell if a standby can write; if not, its stream ends."""
        if node.full and self.plant.notices_full:
            self._hang_up(node)
            self._give(node, events.PrimaryLost())
            return False
        return True

    def _hang_up(self, node: Node) -> None:
        line, node.line = node.line, None
        if line is None or not line.open:
            return
        line.open = False
        (peer,) = set(line.ends) - {node.name}
        other, life = self.nodes[peer], self.nodes[peer].life

        def notice() -> None:
            if other.life != life or other.line not in (line, None):
                return
            other.line = None
            standby = isinstance(other.machine, following.Standby)
            lost: Any = events.PrimaryLost() if standby else events.StandbyLost()
            self._give(other, lost)

        self.at(self._delay(), notice)

    # ---- the object --------------------------------------------------------------

    def _ask_store(self, node: Node, effect: Any) -> None:
        life, answered = node.life, False

        def answer(event: Any) -> None:
            nonlocal answered
            if not answered and node.life == life:
                answered = True
                self._give(node, event)

        def arrive() -> None:
            if node.name in self.cut:
                return
            back = self._carry_out(effect)
            if not (self.rough and self.random.random() < 0.05):
                self.at(self._delay(), lambda: answer(back))

        if not (self.rough and self.random.random() < 0.05):
            times = [1] * 18 + [100, 1000] if self.rough else [1]
            self.at(self._delay() * self.random.choice(times), arrive)
        self.at(TIMEOUT_S, lambda: answer(events.StoreSilent()))

    def _carry_out(self, effect: Any) -> Any:
        now = str(self.generation) if self.generation else NO_GENERATION
        if isinstance(effect, events.ReadMandate):
            return events.MandateRead(generation=now, mandate=self.mandate)
        if self.plant.generations and effect.generation != now:
            return events.WriteRefused()
        self.generation, self.mandate = self.generation + 1, effect.mandate
        return events.MandateWritten(generation=str(self.generation))

    def _delay(self) -> float:
        return self.random.expovariate(20.0) if self.rough else 0.01
