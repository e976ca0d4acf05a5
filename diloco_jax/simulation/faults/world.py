"""A run in which everything may fail: production protocol, islands, log and recovery.

Time is virtual and nothing is drawn here, so a schedule always plays the same. Dead
processes are started again, as `diloco run` or an operator would do, and broken
connections are tried again. `faults` causes the faults through the methods of
`FaultyWorld`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.coordinator.anchors import LEASES_AWAITED
from diloco_jax.protocol.coordinator.state import RunResumed, initial
from diloco_jax.protocol.island.conversation import Fetch
from diloco_jax.protocol.island.reporting import Introduction
from diloco_jax.protocol.messages import (
    AnchorRequest,
    FromCoordinator,
    Granted,
    Hello,
    Steer,
    Version,
)
from diloco_jax.simulation.clock import (
    BOTH,
    DOWN,
    UP,
    Clock,
    Line,
    LineSpeed,
    Way,
    Ways,
)
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.arrays import DigestBody, first_anchors
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator, VirtualGatherer
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.facts import Opened, ViolationError
from diloco_jax.simulation.faults.faults import (
    LEASE_S,
    LOOKS_EVERY_S,
    ArmedFault,
    Restart,
    ScheduledFault,
)
from diloco_jax.simulation.faults.invariants import Monitor
from diloco_jax.simulation.faults.liveness import Expectations
from diloco_jax.simulation.faults.schedule import RESTART_S, RETRY_S, Schedule
from diloco_jax.simulation.faults.unit import Unit
from diloco_jax.simulation.island import (
    Connection,
    IslandSpec,
    VirtualFetch,
    VirtualIsland,
)

REPORT_S = LEASE_S / 3
MOST_CALLS = 500_000
"""Calls of the clock at most; a run has some thousand, or ten times that where a rule
loses steps."""

RESEND_S = 0.3
"""Seconds from a transfer that its checksum refused to the next attempt."""


@dataclasses.dataclass
class Network:
    """Network between an island and the coordinator, for all its connections.

    latency_s, transfer_s: seconds that a message and a transfer take.
    """

    latency_s: float
    transfer_s: float
    held: set[Way] = dataclasses.field(default_factory=set)
    """Directions in which nothing comes through; messages wait for the connection."""
    control_late_s: float = 0.0
    bulk_late_s: float = 0.0
    repeat_after_s: float = 0.0
    """Seconds after which sent messages arrive a second time; 0 = they arrive once."""
    corrupts: bool = False
    """True if bulk bytes are damaged on the way, so that their checksum fails."""


class FaultyLine(Line):
    """A connection through a faulty network.

    Control messages stay in order in each direction, except for repeated ones.
    """

    def __init__(self, clock: Clock, network: Network) -> None:
        super().__init__(clock, LineSpeed())
        self._network = network
        self._lingers = False
        self._waiting: list[Callable[[], None]] = []
        self._in_order: dict[Ways, float] = {UP: 0.0, DOWN: 0.0}

    def linger(self) -> None:
        """Let the messages that the island has sent arrive even after `cut`."""
        self._lingers = True

    def release(self) -> None:
        """Deliver the messages that waited, unless their direction is still held."""
        waiting, self._waiting = self._waiting, []
        for land in waiting:
            land()

    def _control(self, ways: Ways, arrive: Callable[[], None]) -> None:
        network = self._network
        at = self._clock.now + network.latency_s + network.control_late_s
        at = self._in_order[ways] = max(at, self._in_order[ways])
        self._carry(at, ways, arrive)

    def _bulk(self, ways: Ways, nbytes: int, arrive: Callable[[], None]) -> None:
        network = self._network
        at = self._clock.now + network.transfer_s + network.bulk_late_s
        if not network.corrupts:
            self._carry(at, ways, arrive)
            return

        def again() -> None:
            if self.open:
                self._bulk(ways, nbytes, arrive)

        self._clock.at(at + RESEND_S, again)

    def _carry(self, at: float, ways: Ways, arrive: Callable[[], None]) -> None:
        network = self._network

        def land() -> None:
            if not self.open and not (self._lingers and ways == UP):
                return
            if network.held and ways & network.held:
                self._waiting.append(land)
            else:
                arrive()

        self._clock.at(at, land)
        # What is fetched comes once.
        if network.repeat_after_s and ways != BOTH:
            self._clock.at(at + network.repeat_after_s, land)


class FaultyIsland(VirtualIsland):
    """One incarnation. Its world starts the next one."""

    def __init__(self, world: FaultyWorld, spec: IslandSpec, incarnation: int) -> None:
        self.who = (spec.name, incarnation)
        self._world, self._monitor = world, world.monitor
        self.body = DigestBody(
            ADOPT_RULES.find(world.run.sync.adopt),
            world.run.inner.learning_rate,
            functools.partial(self._seen, world.monitor.adopted),
            lambda *of: self._seen(world.monitor.trained, self.session, *of),
        )
        self.takes: Counter[int] = Counter()
        """Takes by fragment."""
        self.lies: int | None = None
        """It makes its anchors up, and claims to be so many merges ahead."""
        self.gives_how = ""
        """"nothing" or "lies": what others of its region have from it."""
        super().__init__(spec, incarnation, world.run, world.clock, self.body, REPORT_S)

    def received(self, message: FromCoordinator) -> None:
        if isinstance(message, Granted) and self.ended is None:
            self._monitor.heard(self.who, self.session, message)
        super().received(message)

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        assert self.boundary is not None
        self.takes[fragment] += 1
        for take in self.boundary.books.outstanding():
            if take.fragment == fragment:
                self._seen(self._monitor.took, take, encoded)
        super().put(fragment, tick, encoded)

    @property
    def term(self) -> int:
        """The latest term that it has been in."""
        return self._conversation.status().term

    def send_anchor(self, asked: AnchorRequest) -> None:
        line, to = self.line, self._coordinator
        anchor = self.body.anchor(asked.fragment)
        if self.lies is not None:
            anchor = anchor.made_up(self.lies)
        if line is not None and isinstance(to, VirtualGatherer):
            line.upload(0, lambda: to.anchor(self.who, asked, anchor))

    def _hello(self, who: Introduction) -> Hello:
        said = super()._hello(who)
        if not isinstance(self._coordinator, VirtualGatherer):
            return said
        versions = [
            v._replace(number=v.number + (self.lies or 0)) for v in said.versions
        ]
        # Merges here have no length; this one tells what is made up from the rest.
        return replace(said, versions=tuple(versions), changes=(1.0,) * len(versions))

    def neighbour(self, name: str) -> FaultyIsland | None:
        world = self._world
        cut_off = world.networks[self.name].held or world.networks[name].held
        other = world.islands[name]
        return None if cut_off or other.ended is not None else other

    def gives(self, fetch: Fetch) -> VirtualFetch | None:
        found = super().gives(fetch)
        if found is not None and self.gives_how == "lies":
            return found._replace(data=[b"something else"])
        return None if self.gives_how else found

    def is_past(self, fetch: Fetch) -> bool:
        return not self.gives_how and super().is_past(fetch)

    def turned_away(self, reason: str) -> None:
        super().turned_away(reason)
        self._world.refused(self)

    def postponed(self, connection: Connection) -> None:
        newest = self._world.islands[self.name] is self
        if newest and self.line is connection.line:
            self._world.lose_connection(self, RETRY_S)

    def _seen(
        self, observe: Callable[..., None], *observation: Any, **facts: Any
    ) -> None:
        """Pass an observation on, if its process is in the run."""
        if self._monitor.belong_to(self.who, self.session):
            observe(self.who, *observation, **facts)


class FaultyWorld:
    """World that plays one schedule: all its processes, their connections, its disk."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.run, self.config = schedule.configs()
        self.clock = Clock()
        self.networks = {
            name: Network(schedule.latency_s, schedule.transfer_s)
            for name in schedule.islands
        }
        self.monitor = Monitor(self.config)
        self.struck: Counter[str] = Counter()
        """Faults that happened, by kind."""
        self.crashes = 0
        self.islands: dict[str, FaultyIsland] = {}
        """Newest incarnation of each island, by name."""
        self.processes: list[FaultyIsland] = []
        """All processes that run, stale ones too."""
        self.slowness = dict.fromkeys(schedule.islands, 1.0)

        self.torn_snapshots = 0
        self.extensions = 0
        """Times that the run was over, and went on to more tokens."""
        self._armed: dict[str, list[Any]] = {}
        """Faults that wait, one of each kind, and for how much more."""
        self._expected = Expectations(schedule, self.clock, self._lacks_tokens)
        self._expected.counts["merges of fragments"] = lambda: dict(
            enumerate(self.merges)
        )
        self._expected.counts["takes of islands' fragments"] = lambda: {
            (name, fragment): island.takes[fragment]
            for name, island in self.islands.items()
            for fragment in range(self.config.fragments)
        }
        self._wanted = dict.fromkeys(sorted(schedule.scavenged), True)
        """Islands that the config does not name, and whether an operator wants them
        to be let in."""
        self.unit = Unit(self, Disk())
        """The coordinator that leads the run, or is to."""
        self.first: Unit | None = None
        """One that sleeps, or is back, while a second leads."""
        self._reached: Unit | None = None
        """The unit that islands reach in place of the one that leads."""
        self._look()

    @property
    def coordinator(self) -> FaultyCoordinator | None:
        """The lead of the run, if it is up and has state."""
        return self.unit.lead

    def play(self) -> None:
        """Play until the run is over, for good. Raises ViolationError."""
        state = initial(self.config)
        self.unit.disk.begin(state, first_anchors(self.config.fragments))
        self.unit.start(clock_s=1000.0)
        for name in self.schedule.islands:
            self.start_island(name)
        for fault in self.schedule.faults:
            self.clock.at(fault.at_s, functools.partial(self._strike, fault))
        self._expected.begin()
        self._until_over()
        for total_tokens in self.schedule.extended_to:
            self.extend(total_tokens)

    def _until_over(self) -> None:
        self.clock.run(done=self._is_over, most=MOST_CALLS)
        if not self._is_over():
            what = f"{MOST_CALLS} things happened within {self.clock.now:.1f} s"
            raise ViolationError(liveness.NAME, what)
        assert self.coordinator is not None
        self.monitor.finished(self.coordinator.state)

    def _is_over(self) -> bool:
        return self.coordinator is not None and self.coordinator.finished

    def _lacks_tokens(self) -> bool:
        return self.coordinator is None or self.coordinator.state.phase == "running"

    def _strike(self, fault: ScheduledFault) -> None:
        if not fault.strike(self):
            self.clock.after(RETRY_S, functools.partial(self._strike, fault))

    # ---- an operator --------------------------------------------------------------

    def extend(self, total_tokens: int) -> None:
        """Start all processes of a run that is over with a config of more tokens, and
        play until it is over. Raises ViolationError."""
        assert self.coordinator is not None
        if total_tokens <= self.coordinator.state.progress_tokens:
            return  # The product refuses that.
        self.extensions += 1
        extended = replace(self.schedule, total_tokens=total_tokens)
        self.run, self.config = extended.configs()
        self._begin_again(RESTART_S)
        self._expected.begin_again(RESTART_S, total_tokens)
        self._until_over()

    def stop_run(self, for_s: float) -> bool:
        """Stop all processes, and resume the run; False without a coordinator, or if it
        is at its end."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.state.phase != "running":
            return False
        islands = coordinator.state.islands.items()
        steps = {(name, island.incarnation): island.steps for name, island in islands}
        self.unit.resumed = RunResumed(steps=steps)
        self._begin_again(for_s)
        return True

    def _begin_again(self, after_s: float) -> None:
        """End all processes, and start them again."""
        for island in self.processes:
            island.die()
        self.unit.end(Restart(down_s=after_s, clock_s=self.clock.now))
        for name in self.schedule.islands:
            self.start_island_after(after_s, name)

    def order(self, name: str, *, admitted: bool) -> None:
        """Let an island in, or no longer. The order is repeated until the coordinator's
        state follows it: it may be away, or have lost its state."""
        self._wanted[name] = admitted
        self.repeat_orders()

    def repeat_orders(self) -> None:
        """Give the orders that the coordinator's state does not follow."""
        for name, admitted in self._wanted.items():
            coordinator = self.coordinator
            if coordinator is None or coordinator.waits:
                return
            if (name in coordinator.state.admitted) != admitted:
                order = Steer(how="admit" if admitted else "remove", island=name)
                coordinator.hear(order)

    def _look(self) -> None:
        if self._wanted:
            self.repeat_orders()
            self.clock.after(LOOKS_EVERY_S, self._look)

    # ---- the coordinator ------------------------------------------------------------

    @property
    def new_term_within_s(self) -> float:
        """Seconds from a coordinator's start without state to its first welcome: it
        awaits all islands, and each anchor takes a boundary and a transfer, and the
        ballots about it as long."""
        schedule = self.schedule
        awaited_s = 2 * LEASES_AWAITED * LEASE_S + RETRY_S
        anchor_s = 2 * (schedule.slowest_s + schedule.transfer_s)
        return awaited_s + self.config.fragments * anchor_s

    def judged(self, opened: Opened | None) -> Opened | None:
        """Return the term to go on with. If its values are made up, and too few islands
        could check them, an operator reads of that and stops the liars."""
        liars = {p.name for p in self.processes if p.lies is not None}
        if opened is None or self.monitor.has_made_up(opened):
            for process in self.processes:
                process.lies = None
            return None
        offers = {n: hello for n, hello in opened.offers.items() if n not in liars}
        return dataclasses.replace(opened, offers=offers)

    def opened(self, opened: Opened) -> None:
        """Begin a new term; another coordinator's decisions concern nobody now."""
        self.monitor.opened(opened)
        if self.first is not None and self.first.lead is not None:
            self.first.lead.monitor = Unwatched()

    def nothing_gathered(self, unit: Unit) -> None:
        """Save a run of which no process has an anchor: its disk comes back."""
        if any(p.boundary is not None for p in self.processes if p.ended is None):
            return
        if unit.disk.has_run or self.first is None:
            unit.disk.empty = False
        else:
            self._give_up_second()

    def has_anchor(self, fragment: int, known: Collection[Version]) -> bool:
        """Tell whether a process has an anchor of a fragment at one of the versions."""
        return any(
            island.ended is None
            and island.boundary is not None
            and island.body.anchor(fragment).version in known
            for island in self.islands.values()
        )

    def arm(self, fault: ArmedFault) -> bool:
        """Let a fault wait for what it awaits; False if one of its kind waits."""
        if fault.kind in self._armed:
            return False
        self._armed[fault.kind] = [fault, getattr(fault, fault.awaits, 0)]
        return True

    def met(self, what: str, unit: Unit) -> Iterator[Any]:
        """Yield the armed faults that happen now, as a unit does what they await."""
        for kind, armed in list(self._armed.items()) if unit is self.unit else ():
            fault, left = armed
            if fault.awaits != what or (what == "effects" and unit.lead is None):
                continue  # Another fault has ended the lead.
            if left:
                armed[1] -= 1
            else:
                del self._armed[kind]
                yield fault

    def sleep(self, for_s: float) -> None:
        """Let the lead's machine sleep: nothing reaches it."""
        assert self.unit.lead is not None
        for name in self.schedule.islands:
            self.hold(name, BOTH, for_s)
        self.unit.lead.sleep(for_s)

    # ---- two at once ----------------------------------------------------------------

    def begin_second(self, for_s: float) -> None:
        """Let the lead's machine sleep, while an operator starts a second coordinator
        without state. Once the first is back, islands reach that again for a while."""
        first = self.unit
        assert first.lead is not None
        first.lead.sleep(for_s)
        second = Unit(self, Disk())
        second.disk.empty = True
        self.first = first
        self._go_on_with(second)
        second.start(self.clock.now)
        self.clock.after(for_s, lambda: self._is_back(first))

    def _is_back(self, first: Unit) -> None:
        if self.first is not first:
            return
        if first.lead is not None and first.lead.monitor is self.monitor:
            self._give_up_second()  # It has opened no term.
            return
        self._reached = first
        self.lose_connections(0.0)
        self.clock.after(LEASE_S, lambda: self.outdated(first))

    def _give_up_second(self) -> None:
        """Go on with the first coordinator, which an operator finds to be right."""
        assert self.first is not None
        first, self.first = self.first, None
        self._go_on_with(first)

    def _go_on_with(self, unit: Unit) -> None:
        """Let another unit lead; armed faults are of that one now."""
        self.unit = unit
        self.lose_connections(0.0)

    def outdated(self, unit: Unit) -> None:
        """End a coordinator of an earlier term for good."""
        assert unit is not self.unit, "the run's own"
        if unit.lead is not None:
            unit.lead.die()
            unit.lead = None
        if self.first is unit:
            self.first = self._reached = None
            self.lose_connections(0.0)

    @property
    def merges(self) -> list[int]:
        """Merges by fragment."""
        return self.monitor.merges

    def begun(self, fault: ScheduledFault, lasts_s: float) -> bool:
        """Note that a fault happens now; return True."""
        self.struck[fault.kind] += 1
        if not fault.awaits_end:
            self.clock.after(lasts_s, self._expected.fault_ended)
        return True

    def set_for(
        self, for_s: float, of: object, field: str, value: Any, usual: Any = 1.0
    ) -> None:
        """Set a field of an object for a while, and then to its usual value again."""
        setattr(of, field, value)
        self.clock.after(for_s, lambda: setattr(of, field, usual))

    # ---- islands ------------------------------------------------------------------

    def make_island(self, name: str, incarnation: int) -> FaultyIsland:
        """Make a process that has not said hello yet."""
        plan = self.schedule.islands[name]
        spec = IslandSpec(
            name=name,
            batch_size=plan.batch_size,
            step_seconds=lambda step: plan.step_s * self.slowness[name],
            join_seconds=plan.join_s,
            lookahead=plan.lookahead,
        )
        island = FaultyIsland(self, spec, incarnation)
        self.processes = [p for p in self.processes if p.ended is None]
        self.processes.append(island)
        return island

    def start_island(self, name: str) -> None:
        """Start the next incarnation of an island."""
        before = self.islands.get(name)
        incarnation = before.incarnation + 1 if before is not None else 1
        self.islands[name] = self.make_island(name, incarnation)
        self.connect(self.islands[name])

    def start_island_after(self, seconds: float, name: str) -> None:
        """Start an island later, unless another one started."""
        before = self.islands[name]

        def start() -> None:
            if self.islands[name] is before:
                self.start_island(name)

        self.clock.after(seconds, start)

    def crash_island(
        self, name: str, down_s: float, noticed: bool = True, lingers: bool = False
    ) -> None:
        """Kill the newest incarnation of an island, unless it has ended; start the
        next one later."""
        island = self.islands[name]
        if island.ended is not None:
            return
        self.crashes += 1
        if lingers:
            _linger(island)
        island.die()
        if noticed:
            self._notice(island)
        self.start_island_after(down_s, name)

    def refused(self, island: FaultyIsland) -> None:
        """Start a refused island anew, as its operator would, unless it is replaced."""
        if self.islands[island.name] is island:
            self.start_island_after(RESTART_S, island.name)

    # ---- connections ----------------------------------------------------------------

    def connect(self, island: FaultyIsland) -> None:
        """Try until the island is connected, or has ended."""
        if island.ended is not None or island.line is not None:
            return
        network, peer = self.networks[island.name], self._reached_by(island).peer
        if peer is None or network.held:
            self.clock.after(RETRY_S, lambda: self.connect(island))
        else:
            island.connect(peer, FaultyLine(self.clock, network))

    def break_connection(
        self, island: FaultyIsland, away_s: float, noticed: bool, lingers: bool
    ) -> None:
        """Break the connection of an island."""
        if lingers:
            _linger(island)
        self.lose_connection(island, away_s)
        if noticed:
            self._notice(island)

    def hold(self, name: str, ways: Iterable[Way], for_s: float) -> None:
        """Hold all messages in these directions back for `for_s` seconds.

        After a lease of silence both ends give the connection up.
        """
        network = self.networks[name]
        network.held |= set(ways)
        island = self.islands[name]
        line = island.line

        def release() -> None:
            network.held -= set(ways)
            for process in self.processes:
                if isinstance(process.line, FaultyLine) and process.name == name:
                    process.line.release()

        def give_up() -> None:
            if island.line is line and line is not None:
                self.lose_connection(island, 0.0)
                self._notice(island)

        self.clock.after(for_s, release)
        if for_s > LEASE_S:
            self.clock.after(LEASE_S, give_up)

    def lose_connections(self, noticed_s: float) -> None:
        """Cut all lines; see `lose_connection`."""
        for island in self.processes:
            self.lose_connection(island, noticed_s)

    def lose_connection(self, island: FaultyIsland, noticed_s: float) -> None:
        """Cut the island's line; it notices after `noticed_s` and tries again."""
        line = island.line
        if line is None:
            return
        line.cut()

        def notice() -> None:
            if island.line is line:
                island.disconnect()
                self.connect(island)

        self.clock.after(noticed_s, notice)

    def _reached_by(self, island: FaultyIsland) -> Unit:
        """Return the unit that an island reaches. One that has not heard of the second
        coordinator's term may go on with the first; here it finds the second."""
        reached = self._reached
        if reached is None or reached.lead is None:
            return self.unit
        return reached if island.term > reached.lead.state.term else self.unit

    def _notice(self, island: FaultyIsland) -> None:
        """Let the coordinator see that the connection is gone."""
        peer = self._reached_by(island).peer
        if peer is not None and island.peer is not None:
            peer.disconnected(island.peer)


class Unwatched:
    """Observes nothing, in place of the monitor: of a coordinator that no longer
    leads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *observed, **facts: None


def _linger(island: FaultyIsland) -> None:
    if isinstance(island.line, FaultyLine):
        island.line.linger()
