"""A worker's machine, which is not the lead's: its disk, its outpost, its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.protocol.holding import Obeyed
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.faults.apart_process import HoldingProcess
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.faults.disk import Disk

if TYPE_CHECKING:
    from diloco_jax.protocol.holding import ToHolder
    from diloco_jax.simulation.faults.apart_line import DialledLine
    from diloco_jax.simulation.faults.apart_world import ApartWorld


class WorkerDisk(Disk):
    """Snapshots and publishes of a worker. A person finds a copy of all that was ever
    on it, for runs in which no island has an anchor."""

    def __init__(self, fragments: int) -> None:
        super().__init__()
        self._format(fragments)
        self._copies = {fragment: ({}, {}) for fragment in range(fragments)}

    def prepare(self, fragment: int, version: Version, publish: bytes) -> bool:
        """See Disk."""
        self._copies[fragment][1][version] = publish
        return super().prepare(fragment, version, publish)

    def save_fragment(self, fragment: int, anchor: Anchor) -> bool:
        """See Disk."""
        self._copies[fragment][0][anchor.version] = anchor
        return super().save_fragment(fragment, anchor)

    def begin_fragment(self, fragment: int, anchor: Anchor) -> bool:
        """See Disk."""
        self._copies[fragment][0][anchor.version] = anchor
        return super().begin_fragment(fragment, anchor)


class ApartWorker:
    """One worker. Its outpost lets in the leads that the product's would."""

    def __init__(
        self, world: ApartWorld, number: int, fragments: tuple[int, ...]
    ) -> None:
        self.world, self.number, self.fragments = world, number, fragments
        self.disk = WorkerDisk(world.config.fragments)
        self.obeyed = Obeyed()
        """On its disk: the line that it obeyed last."""
        self.process: HoldingProcess | None = None
        self.line: DialledLine | None = None
        """The line to the lead that it obeys."""
        self._down_until = 0.0
        self._alone = 0
        """Counts the times at which it had no lead."""

    @property
    def is_down(self) -> bool:
        """True while nobody answers on this machine."""
        return self.world.clock.now < self._down_until

    # ---- leads ----------------------------------------------------------------------

    def come(self, line: DialledLine) -> None:
        """Let a lead in that has dialled, or refuse it."""
        after = None if self.is_down else self.obeyed.after(line.begin)
        if self.is_down:
            line.part()
        elif after is None:
            line.refuse()
        elif not self._has_taken(line):
            line.part()  # The disk is full: files that should be here are not.
        else:
            self.obeyed = after
            before, self.line = self.line, line
            if before is not None:
                before.part()
            if self.process is None:
                self.process = HoldingProcess(self)
                self.process.begin(line)
            else:
                self.process.go_on(line)

    def _has_taken(self, line: DialledLine) -> bool:
        """Take in the files that a lead has of the beginning of a run or a term."""
        return all(
            self.disk.begin_fragment(fragment, line.files[fragment])
            for fragment in self.fragments
            if fragment in line.files
        )

    def hear(self, line: DialledLine, message: ToHolder) -> None:
        """Do what a lead says, if it has the newest line."""
        if line is self.line and self.process is not None:
            self.process.hold(message)

    def lose_line(self, line: DialledLine) -> None:
        """Serve on without a lead, but not for ever."""
        if line is not self.line:
            return
        self.line, process = None, self.process
        if process is None:
            return
        process.leave()
        self._alone += 1
        alone = self._alone

        def end() -> None:
            waits = self.line is None and self._alone == alone
            if waits and self.process is process:
                self.end_process()

        self.world.clock.after(self.world.schedule.outage_s, end)

    # ---- its ends -------------------------------------------------------------------

    def end_process(self) -> None:
        """End the process, whose outpost tells the lead."""
        process, self.process = self.process, None
        if process is not None:
            process.dead = True
            self.world.monitor.worker_died(self.fragments)
        line, self.line = self.line, None
        if line is not None:
            line.part()

    def crash(self, noticed_s: float, down_s: float) -> None:
        """Lose the machine for a while: the lead hears of it `noticed_s` later."""
        self._down_until = self.world.clock.now + noticed_s + down_s
        line, self.line = self.line, None
        if line is not None:
            self.world.clock.after(noticed_s, line.part)
        self.end_process()
