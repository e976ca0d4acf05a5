"""A run in which everything may fail: production protocol, islands, log and recovery.

Time is virtual and nothing is drawn here, so a schedule always plays the same. Dead
processes are started again, as `diloco run` or an operator would do, and broken
connections are tried again. `faults` causes the faults through the methods of
`FaultyWorld`.
"""

from __future__ import annotations

import functools
from typing import Any

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import recovery, workers
from diloco_jax.protocol.coordinator.events import (
    FragmentsLost,
    RunExtended,
    RunResumed,
)
from diloco_jax.protocol.coordinator.gathering import LEASES_AWAITED
from diloco_jax.protocol.coordinator.state import State, initial
from diloco_jax.protocol.messages import Steer
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.arrays import first_anchors
from diloco_jax.simulation.faults.coordinator import (
    FaultyCoordinator,
    Surroundings,
    VirtualGatherer,
)
from diloco_jax.simulation.faults.disk import Disk, EmptyDiskError
from diloco_jax.simulation.faults.facts import Opened, ViolationError
from diloco_jax.simulation.faults.faults import LEASE_S, LOOKS_EVERY_S, Fault, Restart
from diloco_jax.simulation.faults.liveness import Expectations
from diloco_jax.simulation.faults.network import BOTH
from diloco_jax.simulation.faults.scene import Scene
from diloco_jax.simulation.faults.schedule import RESTART_S, RETRY_S, Schedule

MOST_CALLS = 500_000
"""Calls of the clock at most; a run has some thousand, or ten times that where a rule
loses steps."""
AGAIN_S = 0.5
"""Seconds between two looks whether a lost fragment can be gathered."""
ROUND_EVERY_S = 6.0
"""Seconds for a round of snapshots of all fragments."""
ROUND_S = 0.7
"""Seconds for writing all fragments, while the run goes on."""


class FaultyWorld(Scene):
    """World that plays one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.torn_snapshots = 0
        self.extensions = 0
        """Times that the run was over, and went on to more tokens."""
        self._resumed: RunResumed | None = None
        """Event that a coordinator hears first after a stop of the run."""
        self._armed: dict[str, list[Any]] = {}
        """Faults that happen after so many effects of the lead, one of each kind."""
        self._disk_failure: Any = None
        """Fault with a restart that an append meets."""
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

    def _is_over(self) -> bool:
        return self.coordinator is not None and self.coordinator.finished

    def _lacks_tokens(self) -> bool:
        return self.coordinator is None or self.coordinator.state.phase == "running"

    def _strike(self, fault: Fault) -> None:
        if not fault.strike(self):
            self.clock.after(RETRY_S, functools.partial(self._strike, fault))

    def fault_ended(self) -> None:
        self._expected.fault_ended()

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
            names = frozenset(self.schedule.islands)
            self.gatherer = VirtualGatherer(
                self.config, names, self.clock, self._gathered
            )
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
        coordinator = FaultyCoordinator(self.surroundings(), state, merging, offset_s)
        coordinator.lost_fragments = lost
        self._serve(coordinator)

    def surroundings(self) -> Surroundings:
        """Return what a coordinator runs on."""
        return Surroundings(
            schedule=self.schedule,
            config=self.config,
            clock=self.clock,
            disk=self.disk,
            monitor=self.monitor,
            survives=self._survives,
            disk_failed=self._disk_failed,
        )

    def _serve(self, coordinator: FaultyCoordinator) -> None:
        """Let it hear of all that precedes any island."""
        self.coordinator = coordinator
        if coordinator.state.phase == "done":
            coordinator.hear(RunExtended())
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            coordinator.hear(resumed)
        if coordinator.dead:
            return
        self._tell_lost(coordinator)
        self._order()

    @property
    def new_term_within_s(self) -> float:
        """Seconds from a coordinator's start without state to its first welcome: it
        awaits all islands, and each anchor takes a boundary and a transfer."""
        schedule = self.schedule
        awaited_s = 2 * LEASES_AWAITED * LEASE_S + RETRY_S
        anchor_s = schedule.slowest_s + schedule.transfer_s
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

    def _survives(self, lead: FaultyCoordinator) -> bool:
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
        dealt = workers.deal(config.fragment_sizes, config.workers)
        return [f for f, of in enumerate(dealt) if of == worker % config.workers]

    def _tell_lost(self, lead: FaultyCoordinator) -> None:
        """Tell a lead which has just come up what its workers have lost."""
        for worker in range(self.config.workers):
            lost = lead.lost_fragments & set(self._fragments_of(worker))
            if lost:
                own = tuple(sorted(lost))
                lead.hear(FragmentsLost(worker=worker, fragments=own))
        self._look_for_anchors(lead)

    def _look_for_anchors(self, lead: FaultyCoordinator) -> None:
        """Look now and then whether some process has an anchor of each lost fragment
        that counts. If none has, the run is lost, unless that disk comes back."""
        if lead.dead or not lead.lost_fragments:
            return
        for fragment in sorted(lead.lost_fragments):
            state = lead.state.fragments[fragment]
            known = {merged.version for merged in state.newest}
            if not any(
                island.ended is None
                and island.boundary is not None
                and island.body.anchor(fragment).version in known
                for island in self.islands.values()
            ):
                lead.disk.bring_back(fragment, state.version)
                self._end_unit(lead, 0.0, AGAIN_S)
                return  # The next start looks again.
        again = functools.partial(self._look_for_anchors, lead)
        self.clock.after(AGAIN_S, again)

    # ---- the disk -------------------------------------------------------------------

    def fail_append(self, fault: Any, appends: int, written_share: float) -> bool:
        """Arm a failure after `appends` more appends."""
        if self._disk_failure is not None:
            return False
        self._disk_failure = fault
        self.disk.fails_in, self.disk.written_share = appends, written_share
        return True

    def _disk_failed(self, coordinator: FaultyCoordinator) -> None:
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


class SnapshotRounds:
    """Write the snapshots of whoever leads."""

    def __init__(self, world: Scene) -> None:
        self._world = world
        self.failures: list[Fault] = []
        """Armed failures of the next snapshots."""

    def begin(self) -> None:
        """Write the first one in its turn."""
        self._later(0)

    def _later(self, fragment: int) -> None:
        world = self._world
        every_s = ROUND_EVERY_S / world.config.fragments
        world.clock.after(every_s, functools.partial(self._write, fragment))

    def _write(self, fragment: int) -> None:
        """Write a fragment; after the last one, the state. The next has its turn."""
        world, count = self._world, self._world.config.fragments
        self._later((fragment + 1) % count)
        coordinator, disk = world.coordinator, world.disk
        if coordinator is None or coordinator.waits or not coordinator.has(fragment):
            return
        newest, state = coordinator.anchors.anchors, coordinator.state
        anchor = newest[fragment]
        number = disk.rotate() if fragment == count - 1 else None
        if self.failures:
            world.begun(self.failures.pop(), 0.0)
            return

        def complete() -> None:
            if (
                world.coordinator is not coordinator
                or not coordinator.has(fragment)
                or anchor.version.term != newest[fragment].version.term
            ):
                return
            if disk.save_fragment(fragment, anchor):
                saved, publishes = disk.saved(fragment), disk.published(fragment)
                world.monitor.cut(fragment, saved, publishes)
            if number is not None:
                disk.save_state(number, state)

        world.clock.after(ROUND_S / count, complete)
