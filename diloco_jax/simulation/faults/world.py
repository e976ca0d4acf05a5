"""A run in which everything may fail: production protocol, islands, log and recovery.

Time is virtual and nothing is drawn here, so a schedule always plays the same. Dead
processes are started again, as `diloco run` or an operator would do, and broken
connections are tried again. `strike` causes the faults through the methods of
`FaultyWorld`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.events import RunExtended, RunResumed
from diloco_jax.protocol.coordinator.gathering import LEASES_AWAITED
from diloco_jax.protocol.coordinator.state import State, initial
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.arrays import first_anchors
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.disk import Disk, EmptyDiskError
from diloco_jax.simulation.faults.gatherer import Opened, VirtualGatherer
from diloco_jax.simulation.faults.liveness import Expectations
from diloco_jax.simulation.faults.network import FaultyLine
from diloco_jax.simulation.faults.observing import ViolationError
from diloco_jax.simulation.faults.scene import (
    FaultyIsland,
    Operator,
    Scene,
    SnapshotRounds,
)
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    RESTART_S,
    RETRY_S,
    AnyFault,
    DrawnFault,
    Restart,
    Schedule,
)
from diloco_jax.simulation.faults.worker_crashes import WorkerCrashes
from diloco_jax.simulation.virtual.island import Connection, IslandSpec

REPORT_S = LEASE_S / 3
MOST_CALLS = 500_000
"""Calls of the clock at most; a run has some thousand, or ten times that where a rule
loses steps."""

Strike = Callable[[AnyFault, "FaultyWorld"], bool]


class FaultyWorld(Scene):
    """World that plays one schedule. strike: does or arms a fault; see `strike`."""

    def __init__(self, schedule: Schedule, strike: Strike) -> None:
        super().__init__(schedule)
        self._strike_as = strike
        self.slowness = dict.fromkeys(schedule.islands, 1.0)
        self.torn_snapshots = 0
        self._resumed: RunResumed | None = None
        """Event that a coordinator hears first after a stop of the run."""
        self._expected = Expectations(self)
        self._armed_crash: tuple[DrawnFault, Restart] | None = None
        self._effects_left = 0
        self.worker_crashes = WorkerCrashes(
            self, liveness.gathered_within_s(schedule), self.crash_coordinator
        )
        self.operator = Operator(self)
        self._disk_failure: tuple[DrawnFault, Restart] | None = None
        self.snapshots = SnapshotRounds(self)

    def play(self) -> None:
        """Play until the run is over, for good. Raises ViolationError."""
        state = initial(self.config)
        self.disk.begin(state, first_anchors(self.config.fragments))
        self._start_coordinator(clock_s=1000.0)
        for name in self.schedule.islands:
            self.start_island(name)
        for fault in self.schedule.faults:
            self.clock.at(fault.at_s, functools.partial(self._strike, fault))
        self.snapshots.begin()
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

    def extend(self, total_tokens: int) -> None:
        """Start all processes of a run that is over with a config of more tokens, and
        play until it is over. Raises ViolationError."""
        assert self.coordinator is not None
        if total_tokens <= self.coordinator.state.progress_tokens:
            return  # The product refuses that.
        self.extensions += 1
        extended = msgspec.structs.replace(self.schedule, total_tokens=total_tokens)
        self.run, self.config = extended.configs()
        self._begin_again(self.coordinator, RESTART_S)
        self._expected.begin_again(RESTART_S)
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

    def _is_over(self) -> bool:
        return self.coordinator is not None and self.coordinator.finished

    # ---- faults -------------------------------------------------------------------

    def _strike(self, fault: AnyFault) -> None:
        if not self._strike_as(fault, self):
            self.clock.after(RETRY_S, functools.partial(self._strike, fault))

    def fault_ended(self) -> None:
        """See Scene."""
        self._expected.fault_ended()

    # ---- the coordinator ----------------------------------------------------------

    def _start_coordinator(self, clock_s: float) -> None:
        """Start the coordinator. clock_s: reading of its monotonic clock."""
        try:
            state = self._recovered(self.disk, clock_s)
        except EmptyDiskError:
            self._gather()
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
        self.monitor.recovered(state)
        for fragment, anchor in enumerate(merging.anchors):
            if fragment not in lost:
                self.monitor.restored(fragment, anchor)
                self.monitor.published(fragment, anchor)
        offset_s = clock_s - self.clock.now
        self.coordinator = FaultyCoordinator(self, state, merging, offset_s)
        self.coordinator.lost_fragments = lost
        self._serve(self.coordinator)

    def _serve(self, coordinator: FaultyCoordinator) -> None:
        """Let it hear of all that precedes any island."""
        if coordinator.state.phase == "done":
            coordinator.hear(RunExtended())
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            coordinator.hear(resumed)
        if coordinator.dead:
            return
        self.worker_crashes.lead_is_up(coordinator)
        self.operator.act()

    @property
    def new_term_within_s(self) -> float:
        """Seconds from a coordinator's start without state to its first welcome: it
        awaits all islands, and each anchor takes a boundary and a transfer."""
        schedule = self.schedule
        awaited_s = 2 * LEASES_AWAITED * LEASE_S + RETRY_S
        anchor_s = schedule.slowest_s + schedule.transfer_s
        return awaited_s + self.config.fragments * anchor_s

    def _gather(self) -> None:
        """Gather the islands' anchors: nothing else is left of the state."""
        self.gatherer = VirtualGatherer(
            self.config,
            frozenset(self.schedule.islands),
            self.clock,
            self._gathered,
        )

    def _postponed(self, peer: Connection) -> None:
        island = self.islands[peer.hello.island]
        if island.line is peer.line:
            self.lose_connection(island, RETRY_S)

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

    def persisted(self, by: FaultyCoordinator, record: records.Durable) -> None:
        """Count what a coordinator has appended to its log."""
        if isinstance(record, records.Merged):
            self.merges[record.fragment] += 1

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

    def crash_after(self, fault: DrawnFault, restart: Restart, effects: int) -> bool:
        """Arm a crash after `effects` more effects."""
        if self._armed_crash is not None:
            return False
        self._armed_crash, self._effects_left = (fault, restart), effects
        return True

    def survives(self, coordinator: FaultyCoordinator) -> bool:
        """Tell whether a coordinator lives to carry out its next effect."""
        self.worker_crashes.strike_if_due(coordinator)
        if self._armed_crash is None:
            return True
        self._effects_left -= 1
        if self._effects_left >= 0:
            return True
        (fault, restart), self._armed_crash = self._armed_crash, None
        self.crash_coordinator(coordinator, restart)
        self.begun(fault, max(restart.down_s, restart.noticed_s))
        return False

    def fail_append(
        self, fault: DrawnFault, restart: Restart, appends: int, written_share: float
    ) -> bool:
        """Arm a failure after `appends` more appends."""
        if self._disk_failure is not None:
            return False
        self._disk_failure = (fault, restart)
        self.disk.fails_in, self.disk.written_share = appends, written_share
        return True

    def disk_failed(self, coordinator: FaultyCoordinator) -> None:
        """End a coordinator that could not write a record."""
        assert self._disk_failure is not None
        (fault, restart), self._disk_failure = self._disk_failure, None
        self.crash_coordinator(coordinator, restart)
        self.begun(fault, max(restart.down_s, restart.noticed_s))

    def fill_disk(self, for_s: float, *, brimful: bool) -> None:
        """Leave room for small records only, or for nothing, for a while."""
        self.fill(self.disk, for_s, brimful=brimful)

    def fill(self, disk: Disk, for_s: float, *, brimful: bool) -> None:
        """Fill one of the disks; see `fill_disk`."""
        disk.full, disk.brimful = True, brimful
        self.clock.after(for_s, functools.partial(self._free, disk))

    def _free(self, disk: Disk) -> None:
        disk.full = disk.brimful = False
        if self.coordinator is not None:
            self.coordinator.go_on()

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
        island = FaultyIsland(
            spec,
            incarnation,
            self.run,
            self.clock,
            REPORT_S,
            self.monitor,
            self._refused,
            self._postponed,
        )
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
        """Start an island later, unless the run is over or another one started."""
        before = self.islands[name]

        def start() -> None:
            if self.islands[name] is before:
                self.start_island(name)

        self.clock.after(seconds, start)

    def crash_island(
        self, name: str, down_s: float, *, noticed: bool = True, lingers: bool = False
    ) -> bool:
        """Kill the newest incarnation of an island; False if it has ended."""
        island = self.islands[name]
        if island.ended is not None:
            return False
        self.crashes += 1
        if lingers and isinstance(island.line, FaultyLine):
            island.line.linger()
        island.die()
        if noticed:
            self._notice(island)
        self.start_island_after(down_s, name)
        return True

    def _refused(self, island: FaultyIsland) -> None:
        """Start a refused island anew, as its operator would, unless it is replaced."""
        if self.islands[island.name] is island:
            self.start_island_after(RESTART_S, island.name)
