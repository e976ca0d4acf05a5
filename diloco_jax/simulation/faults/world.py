"""A run in which everything may fail: production protocol, islands, log and recovery.

Time is virtual and nothing is drawn here, so a schedule always plays the same. Dead
processes are started again, as `diloco run` or an operator would do, and broken
connections are tried again. `faults` causes the faults through the methods of
`FaultyWorld`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import recovery, terms
from diloco_jax.protocol.coordinator.anchors import LEASES_AWAITED
from diloco_jax.protocol.coordinator.events import RunExtended, RunResumed
from diloco_jax.protocol.coordinator.search import Aim
from diloco_jax.protocol.coordinator.state import State, initial
from diloco_jax.protocol.holding import deal
from diloco_jax.protocol.messages import AnchorRequest, Steer
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.arrays import Anchor, DigestBody, first_anchors
from diloco_jax.simulation.faults.coordinator import (
    FaultyCoordinator,
    Peer,
    VirtualGatherer,
)
from diloco_jax.simulation.faults.disk import Disk, DiskError, EmptyDiskError
from diloco_jax.simulation.faults.facts import Opened, ViolationError
from diloco_jax.simulation.faults.faults import (
    LEASE_S,
    LOOKS_EVERY_S,
    Restart,
    ScheduledFault,
)
from diloco_jax.simulation.faults.invariants import Monitor
from diloco_jax.simulation.faults.liveness import Expectations
from diloco_jax.simulation.faults.network import BOTH, FaultyLine, Network, Way
from diloco_jax.simulation.faults.schedule import RESTART_S, RETRY_S, Schedule
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.island import Connection, IslandSpec, VirtualIsland

REPORT_S = LEASE_S / 3
MOST_CALLS = 500_000
"""Calls of the clock at most; a run has some thousand, or ten times that where a rule
loses steps."""
ROUND_EVERY_S = 6.0
"""Seconds for a round of snapshots of all fragments."""
ROUND_S = 0.7
"""Seconds for writing all fragments, while the run goes on."""


class FaultyIsland(VirtualIsland):
    """One incarnation. Its world starts the next one."""

    def __init__(self, world: FaultyWorld, spec: IslandSpec, incarnation: int) -> None:
        self.who = (spec.name, incarnation)
        self._world, self._monitor = world, world.monitor
        self.body = DigestBody(
            ADOPT_RULES.find(world.run.sync.adopt),
            world.run.inner.learning_rate,
            functools.partial(self._seen, world.monitor.adopted),
            functools.partial(self._seen, world.monitor.trained),
        )
        self.takes: Counter[int] = Counter()
        """Takes by fragment."""
        super().__init__(spec, incarnation, world.run, world.clock, self.body, REPORT_S)

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        assert self.boundary is not None
        self.takes[fragment] += 1
        for take in self.boundary.books.outstanding():
            if take.fragment == fragment:
                self._seen(self._monitor.took, take, encoded)
        super().put(fragment, tick, encoded)

    def send_anchor(self, asked: AnchorRequest) -> None:
        line, to = self.line, self._coordinator
        anchor = self.body.anchor(asked.fragment)
        if line is not None and isinstance(to, VirtualGatherer):
            line.upload(0, lambda: to.anchor(self.who, asked, anchor))

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
        self.disk = Disk()
        self.struck: Counter[str] = Counter()
        """Faults that happened, by kind."""
        self.crashes = 0
        self.coordinator: FaultyCoordinator | None = None
        self.gatherer: VirtualGatherer | None = None
        """A coordinator without state, which gathers anchors instead."""
        self.islands: dict[str, FaultyIsland] = {}
        """Newest incarnation of each island, by name."""
        self.processes: list[FaultyIsland] = []
        """All processes that run, stale ones too."""
        self.slowness = dict.fromkeys(schedule.islands, 1.0)

        self.torn_snapshots = 0
        self.extensions = 0
        """Times that the run was over, and went on to more tokens."""
        self._resumed: RunResumed | None = None
        """Event that a coordinator hears first after a stop of the run."""
        self._armed: dict[str, list[Any]] = {}
        """Faults that happen after so many effects of the lead, one of each kind."""
        self._disk_failure: Any = None
        """ScheduledFault with a restart that an append meets."""
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
        self._look()
        self.failing_snapshots: list[ScheduledFault] = []
        """Armed failures of the next snapshots."""

    def play(self) -> None:
        """Play until the run is over, for good. Raises ViolationError."""
        state = initial(self.config)
        self.disk.begin(state, first_anchors(self.config.fragments))
        self._start_coordinator(clock_s=1000.0)
        for name in self.schedule.islands:
            self.start_island(name)
        for fault in self.schedule.faults:
            self.clock.at(fault.at_s, functools.partial(self._strike, fault))
        self._write_later(0)
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
        self._begin_again(self.coordinator, RESTART_S)
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
        self._resumed = RunResumed(steps=steps)
        self._begin_again(coordinator, for_s)
        return True

    def _begin_again(self, last: FaultyCoordinator, after_s: float) -> None:
        """End all processes, and start them again."""
        for island in self.processes:
            island.die()
        self._start_again_after(after_s, last)
        for name in self.schedule.islands:
            self.start_island_after(after_s, name)

    def _start_again_after(self, seconds: float, last: FaultyCoordinator) -> None:
        restart = Restart(down_s=seconds, clock_s=self.clock.now)
        last.die()
        self._went_down(last, restart)

    def order(self, name: str, *, admitted: bool) -> None:
        """Let an island in, or no longer. The order is repeated until the coordinator's
        state follows it: it may be away, or have lost its state."""
        self._wanted[name] = admitted
        self._order()

    def _order(self) -> None:
        for name, admitted in self._wanted.items():
            coordinator = self.coordinator
            if coordinator is None or coordinator.waits:
                return
            if (name in coordinator.state.admitted) != admitted:
                order = Steer(how="admit" if admitted else "remove", island=name)
                coordinator.hear(order)

    def _look(self) -> None:
        if self._wanted:
            self._order()
            self.clock.after(LOOKS_EVERY_S, self._look)

    # ---- the coordinator's lives ----------------------------------------------------

    def _start_coordinator(self, clock_s: float) -> None:
        """Start the coordinator. clock_s: reading of its monotonic clock."""
        try:
            state = self._recovered(self.disk, clock_s)
        except EmptyDiskError:
            everything = tuple(range(self.config.fragments))
            self._search(everything, lambda *_: True, self._gathered)
            return
        self._go_on(state, clock_s)

    def _recovered(self, disk: Disk, clock_s: float) -> State:
        """Return the state that a disk's log leads to. Raises EmptyDiskError."""
        found = disk.load()
        log = [records.from_log(line) for line in found.records]
        return recovery.recover(self.config, found.state, log, clock_s)

    def _go_on(self, state: State, clock_s: float) -> None:
        """Let a coordinator go on from a state, with the fragments of its disk."""
        committed = [fragment.version for fragment in state.fragments]
        merging, lost = self.disk.restore(committed)
        if lost:
            self._gather_lost(state, lost)
            return
        self.monitor.recovered(state)
        for fragment, anchor in enumerate(merging.anchors):
            self.monitor.restored(fragment, anchor)
            self.monitor.published(fragment, anchor)
        offset_s = clock_s - self.clock.now
        self._serve(FaultyCoordinator(self, state, merging, offset_s))

    def _serve(self, coordinator: FaultyCoordinator) -> None:
        """Let it hear of all that precedes any island."""
        self.coordinator = coordinator
        if coordinator.state.phase == "done":
            coordinator.hear(RunExtended())
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            coordinator.hear(resumed)
        if not coordinator.dead:
            self._order()

    @property
    def new_term_within_s(self) -> float:
        """Seconds from a coordinator's start without state to its first welcome: it
        awaits all islands, and each anchor takes a boundary and a transfer, and the
        ballots about it as long."""
        schedule = self.schedule
        awaited_s = 2 * LEASES_AWAITED * LEASE_S + RETRY_S
        anchor_s = 2 * (schedule.slowest_s + schedule.transfer_s)
        return awaited_s + self.config.fragments * anchor_s

    def _gathered(self, opened: Opened | None) -> None:
        """Open a new term. With None the coordinator has given up, and its process
        ends.
        """
        self.gatherer = None
        restart_s = RETRY_S
        if opened is None:
            if all(p.boundary is None for p in self.processes if p.ended is None):
                # No process has an anchor: the run is lost, unless its disk comes back.
                self.disk.empty = False
        elif self.disk.empty:
            self.disk.begin(opened.state, opened.anchors)
            self.monitor.opened(opened)
            restart_s = 0.0
        # Otherwise the disk is back, and no new term begins beside it.
        for island in self.processes:
            self.lose_connection(island, 0.0)
        start = functools.partial(self._start_coordinator, self.clock.now)
        self.clock.after(restart_s, start)

    def _search(
        self,
        lacking: tuple[int, ...],
        keep: Callable[[int, Anchor], bool],
        done: Callable[[Opened | None], None],
        **known: Any,
    ) -> None:
        aim = Aim(
            lacking=lacking,
            names=frozenset(self.schedule.islands),
            name=f"opened at {self.clock.now}",
            **known,
        )
        self.gatherer = VirtualGatherer(self.config, aim, self.clock, keep, done)

    def _gather_lost(self, state: State, lost: set[int]) -> None:
        """Gather what workers have lost: the log is whole."""
        fragments = tuple(sorted(lost))
        self.monitor.lost(fragments)

        def keep(fragment: int, anchor: Anchor) -> bool:
            kept = self.disk.begin_fragment(fragment, anchor)
            if kept:
                digest = anchor.value.hex()
                self.monitor.prepared(fragment, anchor.version, digest)
            return kept

        self._search(
            fragments,
            keep,
            functools.partial(self._found_lost, state, lost),
            term=state.term + 1,
            known={f: terms.versions_known(state.fragments[f], {}) for f in lost},
        )

    def _found_lost(self, state: State, lost: set[int], opened: Opened | None) -> None:
        """Begin the next term of lost fragments, and start again from the log."""
        if opened is not None and not self.disk.has_space():
            again = functools.partial(self._found_lost, state, lost, opened)
            self.clock.after(RETRY_S, again)
            return
        self.gatherer = None
        begun = terms.term_records(state, opened.found) if opened is not None else []
        for record in begun:
            try:
                self.disk.append(records.line(record))
            except DiskError as failure:
                if failure.complete:
                    self.monitor.persisted(record)
                fault, self._disk_failure = self._disk_failure, None
                self.begun(fault, fault.restart.lasts_s)
                break
            self.monitor.persisted(record)
        if opened is None:
            self._bring_back(state, lost)
        for island in self.processes:
            self.lose_connection(island, 0.0)
        start = functools.partial(self._start_coordinator, self.clock.now)
        self.clock.after(0.0 if opened is not None else RETRY_S, start)

    def _bring_back(self, state: State, lost: set[int]) -> None:
        """Bring the disk back that had fragments of which no process has an anchor that
        counts: the run would be lost."""
        for fragment in lost:
            known = {merged.version for merged in state.fragments[fragment].newest}
            if not any(
                island.ended is None
                and island.boundary is not None
                and island.body.anchor(fragment).version in known
                for island in self.islands.values()
            ):
                self.disk.bring_back(fragment, state.fragments[fragment].version)

    # ---- the coordinator's ends -----------------------------------------------------

    def crash_coordinator(self, dying: FaultyCoordinator, restart: Restart) -> None:
        """Kill a coordinator; every connection to it breaks."""
        dying.die()
        self.crashes += 1
        if restart.power_cut:
            self.torn_snapshots += dying.disk.tear_snapshots()
        self._went_down(dying, restart)

    def _went_down(self, dead: FaultyCoordinator, restart: Restart) -> None:
        """Break the connections of a coordinator that died; start it again later."""
        self.coordinator = None
        for island in self.processes:
            self.lose_connection(island, restart.noticed_s)
        start = functools.partial(self._start_coordinator, restart.clock_s)
        self.clock.after(restart.down_s, start)

    def arm(self, fault: Any) -> bool:
        """Let a fault happen to the lead after its `effects` more; False if one of this
        kind is armed."""
        if fault.kind in self._armed:
            return False
        self._armed[fault.kind] = [fault, fault.effects]
        return True

    def survives(self, lead: FaultyCoordinator) -> bool:
        """Tell whether a lead lives to carry out its next effect."""
        for kind, armed in list(self._armed.items()):
            armed[1] -= 1
            if armed[1] < 0 and not lead.dead:
                del self._armed[kind]
                fault = armed[0]
                self.begun(fault, fault.meet(self, lead))
        return not lead.dead

    def sleep(self, lead: FaultyCoordinator, for_s: float) -> None:
        """Let the lead's machine sleep: nothing reaches it."""
        for name in self.schedule.islands:
            self.hold(name, BOTH, for_s)
        lead.sleep(for_s)

    # ---- its workers ----------------------------------------------------------------

    def crash_worker(
        self,
        lead: FaultyCoordinator,
        worker: int,
        noticed_s: float,
        down_s: float,
        *,
        disk_lost: bool,
    ) -> float:
        """Kill a worker, and the lead once it notices; return how long it lasts."""
        fragments = self._fragments_of(worker)
        lasts_s = noticed_s + down_s
        if lead.dead_fragments.issuperset(fragments):
            return lasts_s
        if disk_lost:
            lead.disk.lose(fragments)
            lasts_s += liveness.gathered_within_s(self.schedule)
        lead.lose(fragments)
        self.monitor.worker_died(fragments)
        self._end_unit(lead, noticed_s, down_s)
        return lasts_s

    def _end_unit(
        self, lead: FaultyCoordinator, noticed_s: float, down_s: float
    ) -> None:
        """End a lead once it notices that a worker is gone."""

        def notice() -> None:
            if self.coordinator is lead and not lead.dead:
                restart = Restart(down_s=down_s, clock_s=self.clock.now)
                self.crash_coordinator(lead, restart)

        self.clock.after(noticed_s, lambda: lead.when_awake(notice))

    def _fragments_of(self, worker: int) -> list[int]:
        config = self.config
        dealt = deal(config.fragment_sizes, config.workers)
        return [f for f, of in enumerate(dealt) if of == worker % config.workers]

    # ---- the disk -------------------------------------------------------------------

    def fail_append(self, fault: Any, appends: int, written_share: float) -> bool:
        """Arm a failure after `appends` more appends."""
        if self._disk_failure is not None:
            return False
        self._disk_failure = fault
        self.disk.fails_in, self.disk.written_share = appends, written_share
        return True

    def disk_failed(self, coordinator: FaultyCoordinator) -> None:
        """End a coordinator that could not write a record."""
        fault, self._disk_failure = self._disk_failure, None
        self.crash_coordinator(coordinator, fault.restart)
        self.begun(fault, fault.restart.lasts_s)

    def fill_disk(self, for_s: float, *, brimful: bool) -> None:
        """Leave room for small records only, or for nothing, for a while."""
        self.fill(self.disk, for_s, brimful=brimful)

    def fill(self, disk: Disk, for_s: float, *, brimful: bool) -> None:
        """Fill one of the disks; see `fill_disk`."""

        def free() -> None:
            disk.full = disk.brimful = False
            if self.coordinator is not None:
                self.coordinator.go_on()

        disk.full, disk.brimful = True, brimful
        self.clock.after(for_s, free)

    def _write_later(self, fragment: int) -> None:
        """Write the snapshot of a fragment in its turn."""
        every_s = ROUND_EVERY_S / self.config.fragments
        self.clock.after(every_s, functools.partial(self._write_snapshot, fragment))

    def _write_snapshot(self, fragment: int) -> None:
        """Write a fragment; after the last one, the state. The next has its turn."""
        count, lead, disk = self.config.fragments, self.coordinator, self.disk
        self._write_later((fragment + 1) % count)
        if lead is None or lead.waits or not lead.has(fragment):
            return
        newest, state = lead.anchors.anchors, lead.state
        anchor = newest[fragment]
        number = disk.rotate() if fragment == count - 1 else None
        if self.failing_snapshots:
            self.begun(self.failing_snapshots.pop(), 0.0)
            return

        def complete() -> None:
            same_term = anchor.version.term == newest[fragment].version.term
            if self.coordinator is not lead or not lead.has(fragment) or not same_term:
                return
            if disk.save_fragment(fragment, anchor):
                saved, publishes = disk.saved(fragment), disk.published(fragment)
                self.monitor.cut(fragment, saved, publishes)
            if number is not None:
                disk.save_state(number, state)

        self.clock.after(ROUND_S / count, complete)

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
            lead=plan.lead,
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
        network, peer = self.networks[island.name], self._peer_for(island)
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

    def _notice(self, island: FaultyIsland) -> None:
        """Let the coordinator see that the connection is gone."""
        peer = self.coordinator or self.gatherer
        if peer is not None and island.peer is not None:
            peer.disconnected(island.peer)

    def _peer_for(self, island: FaultyIsland) -> Peer | None:
        """Return the peer that an island's next attempt reaches, if it reaches one."""
        return self.coordinator or self.gatherer


def _linger(island: FaultyIsland) -> None:
    if isinstance(island.line, FaultyLine):
        island.line.linger()
