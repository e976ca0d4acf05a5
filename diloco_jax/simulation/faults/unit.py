"""A coordinator as one unit: its lead and workers, whose lives follow each other, and
their disk.

It comes up from its disk, or from what islands have; it dies, sleeps, and loses disks
by the faults of its world.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.search import Aim
from diloco_jax.protocol.coordinator.state import RunExtended, RunResumed, State
from diloco_jax.protocol.holding import deal
from diloco_jax.simulation.faults import liveness
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator, VirtualGatherer
from diloco_jax.simulation.faults.disk import Disk, DiskError, EmptyDiskError
from diloco_jax.simulation.faults.facts import Opened
from diloco_jax.simulation.faults.faults import Restart
from diloco_jax.simulation.faults.schedule import RETRY_S

ROUND_EVERY_S = 6.0
"""Seconds for a round of snapshots of all fragments."""
ROUND_S = 0.7
"""Seconds for writing all fragments, while the run goes on."""


class Unit:
    """Lead, workers and disk, of a `world.FaultyWorld`."""

    def __init__(self, world: Any, disk: Disk) -> None:
        self.disk = disk
        self.lead: FaultyCoordinator | None = None
        self.gatherer: VirtualGatherer | None = None
        """A coordinator without state, which gathers anchors instead."""
        self.resumed: RunResumed | None = None
        """Event that a lead hears first after a stop of the run."""
        self._world, self._clock = world, world.clock
        self._write_later(0)

    @property
    def peer(self) -> FaultyCoordinator | VirtualGatherer | None:
        """The process that islands reach."""
        return self.lead or self.gatherer

    # ---- its starts -----------------------------------------------------------------

    def start(self, clock_s: float) -> None:
        """Start the lead. clock_s: reading of its monotonic clock."""
        if self._world.unit is not self:
            return  # Nobody starts it again.
        config = self._world.config
        try:
            found = self.disk.load()
        except EmptyDiskError:
            everything = tuple(range(config.fragments))
            self._search(everything, lambda *_: True, self._gathered)
            return
        log = [records.from_log(line) for line in found.records]
        state = recovery.recover(config, found.state, log, clock_s)
        merging, lost = self.disk.restore([f.version for f in state.fragments])
        if lost:
            self._gather_lost(state, lost)
            return
        monitor = self._world.monitor
        monitor.recovered(state)
        for fragment, anchor in enumerate(merging.anchors):
            monitor.restored(fragment, anchor)
            monitor.published(fragment, anchor)
        offset_s = clock_s - self._clock.now
        self._serve(FaultyCoordinator(self, self._world, state, merging, offset_s))

    def _serve(self, lead: FaultyCoordinator) -> None:
        """Let a lead hear of all that precedes any island."""
        self.lead = lead
        if lead.state.phase == "done":
            lead.hear(RunExtended())
        resumed, self.resumed = self.resumed, None
        if resumed is not None:
            lead.hear(resumed)
        if not lead.dead:
            self._world.repeat_orders()

    def _start_after(self, seconds: float, clock_s: float | None = None) -> None:
        """Start a lead later. Connections to what was there before are lost."""
        self._world.lose_connections(0.0)
        reading = self._clock.now if clock_s is None else clock_s
        self._clock.after(seconds, functools.partial(self.start, reading))

    def _search(
        self,
        lost: tuple[int, ...],
        keep: Callable[[int, Anchor], bool],
        done: Callable[[Opened | None], None],
        **known: Any,
    ) -> None:
        world = self._world
        names, name = frozenset(world.schedule.islands), f"opened at {self._clock.now}"
        aim = Aim(lost=lost, names=names, name=name, **known)
        self.gatherer = VirtualGatherer(world.config, aim, self._clock, keep, done)

    def _gathered(self, opened: Opened | None) -> None:
        """Open a new term. With None the coordinator has given up, and its process
        ends.
        """
        if self._world.unit is not self:
            return
        self.gatherer = None
        opened = self._world.judged(opened)
        if opened is None:
            self._world.nothing_gathered(self)
            self._start_after(RETRY_S)
        elif self.disk.empty:
            self.disk.begin(opened.state, opened.anchors)
            self._world.opened(opened)
            self._start_after(0.0)
        else:  # The disk is back, and no new term begins beside it.
            self._start_after(RETRY_S)

    def _gather_lost(self, state: State, lost: set[int]) -> None:
        """Gather what workers have lost: the log is whole."""
        fragments, monitor = tuple(sorted(lost)), self._world.monitor
        monitor.lost(fragments)

        def keep(fragment: int, anchor: Anchor) -> bool:
            kept = self.disk.begin_fragment(fragment, anchor)
            if kept:
                digest = anchor.value.hex()
                monitor.prepared(fragment, anchor.version, digest)
            return kept

        self._search(
            fragments,
            keep,
            functools.partial(self._found_lost, state, lost),
            term=state.term + 1,
            last_name=state.term_name,
            known={f: recovery.versions_known(state.fragments[f], {}) for f in lost},
        )

    def _found_lost(self, state: State, lost: set[int], opened: Opened | None) -> None:
        """Begin the next term of lost fragments, and start again from the log."""
        if opened is not None and not self.disk.has_space():
            again = functools.partial(self._found_lost, state, lost, opened)
            self._clock.after(RETRY_S, again)
            return
        self.gatherer = None
        opened = self._world.judged(opened)
        if opened is None:
            for fragment in lost:
                known = {merged.version for merged in state.fragments[fragment].newest}
                if not self._world.has_anchor(fragment, known):
                    # The run would be lost, unless the disk comes back.
                    version = state.fragments[fragment].version
                    self.disk.bring_back(fragment, version)
            self._start_after(RETRY_S)
            return
        for record in recovery.term_records(state, opened.found):
            try:
                self.append(record)
            except DiskError:
                break
        self._start_after(0.0)

    # ---- its ends -------------------------------------------------------------------

    def crash(self, restart: Restart) -> None:
        """Kill the lead; every connection to it breaks. It starts again later."""
        assert self.lead is not None
        self._world.crashes += 1
        if restart.power_cut:
            self._world.torn_snapshots += self.disk.tear_snapshots()
        self.end(restart)

    def end(self, restart: Restart) -> None:
        """End the lead, and start it again later."""
        assert self.lead is not None
        self.lead.die()
        self.lead = None
        self._world.lose_connections(restart.noticed_s)
        start = functools.partial(self.start, restart.clock_s)
        self._clock.after(restart.down_s, start)

    def crash_worker(
        self, worker: int, noticed_s: float, down_s: float, *, disk_lost: bool
    ) -> float:
        """Kill a worker, and the lead once it notices; return how long it lasts."""
        lead, config = self.lead, self._world.config
        assert lead is not None
        dealt = deal(config.fragment_sizes, config.workers)
        fragments = [f for f, of in enumerate(dealt) if of == worker % config.workers]
        lasts_s = noticed_s + down_s
        if lead.dead_fragments.issuperset(fragments):
            return lasts_s
        if disk_lost:
            self.disk.lose(fragments)
            lasts_s += liveness.gathered_within_s(self._world.schedule)
        lead.lose(fragments)
        lead.monitor.worker_died(fragments)

        def notice() -> None:
            if lead.stopped and not lead.dead:
                self._clock.after(RETRY_S, notice)
            elif self.lead is lead and not lead.dead:
                self.crash(Restart(down_s=down_s, clock_s=self._clock.now))

        self._clock.after(noticed_s, notice)
        return lasts_s

    # ---- its disk -------------------------------------------------------------------

    def append(self, record: records.Durable) -> None:
        """Write a record. Raises DiskError, and ends the lead, if the disk fails."""
        world = self._world
        monitor = self.lead.monitor if self.lead is not None else world.monitor
        fault = next(world.met("appends", self), None)
        share = None if fault is None else fault.written_share
        try:
            self.disk.append(records.line(record), share)
        except DiskError as failure:
            assert fault is not None
            if failure.complete:
                monitor.persisted(record)
            world.begun(fault, fault.happen(world, self))
            raise
        monitor.persisted(record)

    def fill_disk(self, for_s: float, *, brimful: bool) -> None:
        """Leave room for small records only, or for nothing, for a while."""
        disk = self.disk

        def free() -> None:
            disk.full = disk.brimful = False
            if self.lead is not None:
                self.lead.go_on()

        disk.full, disk.brimful = True, brimful
        self._clock.after(for_s, free)

    def _write_later(self, fragment: int) -> None:
        """Write the snapshot of a fragment in its turn."""
        every_s = ROUND_EVERY_S / self._world.config.fragments
        self._clock.after(every_s, functools.partial(self._write_snapshot, fragment))

    def _write_snapshot(self, fragment: int) -> None:
        """Write a fragment; after the last one, the state. The next has its turn."""
        count, lead, disk = self._world.config.fragments, self.lead, self.disk
        self._write_later((fragment + 1) % count)
        if lead is None or lead.waits or not lead.has(fragment):
            return
        newest, state = lead.anchors.anchors, lead.state
        anchor = newest[fragment]
        number = disk.rotate() if fragment == count - 1 else None
        for fault in self._world.met("snapshots", self):
            self._world.begun(fault, fault.happen(self._world, self))
            return

        def complete() -> None:
            same_term = anchor.version.term == newest[fragment].version.term
            if self.lead is not lead or not lead.has(fragment) or not same_term:
                return
            if disk.save_fragment(fragment, anchor):
                saved, publishes = disk.saved(fragment), disk.published(fragment)
                lead.monitor.cut(fragment, saved, publishes)
            if number is not None:
                disk.save_state(number, state)

        self._clock.after(ROUND_S / count, complete)
