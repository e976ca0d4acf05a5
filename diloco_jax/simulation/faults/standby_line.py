"""The stream from a primary to its standby, in a world of faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco_jax.protocol.standby.events import (
    Copied,
    Following,
    PrimaryHeard,
    PrimaryLost,
    StandbyAnswered,
    StandbyEvent,
    StandbyLost,
)
from diloco_jax.simulation.virtual.clock import Clock

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.standby_disk import Change
    from diloco_jax.simulation.faults.standby_node import Node

ALIVE_SHARE = 0.5
"""Silence after which the primary gives a sign of life, in its standby's patience."""
SNAPSHOT_LATE_S = 0.5
"""Seconds by which a snapshot comes after what is appended at the same time."""


class StandbyNetwork:
    """The network between the two, for all their streams."""

    def __init__(self, clock: Clock, latency_s: float, copy_s: float) -> None:
        """copy_s: seconds that a copy of all files takes."""
        self.clock, self.latency_s, self.copy_s = clock, latency_s, copy_s
        self.parted = False
        self._waiting: list[Callable[[], None]] = []

    def carry(self, arrive: Callable[[], None], not_before: float = 0.0) -> None:
        """Let a message arrive a latency from now, and neither before that time nor
        before the end of a partition."""
        at = max(self.clock.now + self.latency_s, not_before)
        self.clock.at(at, lambda: self._land(arrive))

    def heal(self) -> None:
        """End the partition; what waited arrives, in order."""
        self.parted = False
        waiting, self._waiting = self._waiting, []
        for arrive in waiting:
            arrive()

    def _land(self, arrive: Callable[[], None]) -> None:
        if self.parted:
            self._waiting.append(arrive)
        else:
            arrive()


class FollowLine:
    """One stream. What the primary appends arrives in order."""

    def __init__(self, network: StandbyNetwork, primary: Node, standby: Node) -> None:
        self.primary, self.standby = primary, standby
        self._network = network
        self._lives = primary.life, standby.life
        self.open = True
        self._copied_at = 0.0
        """Time before which nothing that is appended arrives."""
        self._batch: list[Change] | None = None
        """Changes of this instant, which go in one message."""
        self._sent_at = network.clock.now

    # ---- from the primary -----------------------------------------------------------

    def copy(self) -> None:
        """Send a copy of the disk as it is now, then everything that is written."""
        disk, number = self.primary.disk, self.primary.written
        network, change = self._network, disk.copy()
        disk.send, disk.send_later = self._append, self._append_late
        copied_at = network.clock.now + network.latency_s + network.copy_s
        self._copied_at = copied_at
        network.carry(self._copy_begins)
        network.carry(lambda: self._copied(change, number), copied_at)
        self._beat()

    def _copy_begins(self) -> None:
        if self.open:
            self.standby.act(self._begin_copy)

    def _begin_copy(self) -> None:
        if self._tell_standby(Following()) and self.standby.phase == "copying":
            self.standby.disk.clear()
        elif self.open:
            self.close()

    def _copied(self, change: Change, number: int) -> None:
        def put() -> None:
            if self._reaches_standby() and self._write([change]):
                self._tell_standby(Copied(number=number))

        self.standby.act(put)

    def _append(self, change: Change) -> None:
        if self._batch is not None:
            self._batch.append(change)
            return
        batch = self._batch = [change]
        network = self._network
        if network.clock.now >= self._copied_at:
            self._sent_at = network.clock.now  # Otherwise it goes after the copy.
        numbers: list[int] = []

        def end() -> None:
            numbers.append(self.primary.written)
            if self._batch is batch:
                self._batch = None

        network.clock.last(end)
        network.carry(
            lambda: self.standby.act(lambda: self._appended(batch, numbers)),
            self._copied_at,
        )

    def _append_late(self, change: Change) -> None:
        def put() -> None:
            if self._reaches_standby():
                self._write([change])

        late = self._network.clock.now + SNAPSHOT_LATE_S
        self._network.carry(lambda: self.standby.act(put), max(late, self._copied_at))

    def _appended(self, changes: list[Change], numbers: list[int]) -> None:
        if self._reaches_standby() and self._write(changes):
            self._tell_standby(PrimaryHeard(number=numbers[0]))

    def _write(self, changes: list[Change]) -> bool:
        """Write to the standby's disk; if that is full, the stream ends."""
        disk = self.standby.disk
        if disk.full:
            self.close()
            return False
        for change in changes:
            change(disk)
        return True

    def _beat(self) -> None:
        """Give signs of life where nothing else is sent."""
        if not self.open or self.primary.life != self._lives[0]:
            return
        clock, patience_s = self._network.clock, self.primary.timing.patience_s
        silent_s = clock.now - self._sent_at
        every_s = ALIVE_SHARE * patience_s
        if silent_s >= every_s * 0.99 and not self.primary.paused:
            self._sent_at = clock.now
            self._network.carry(lambda: self.standby.act(self._alive))
            silent_s = 0.0
        clock.after(max(every_s - silent_s, 0.01 * every_s), self._beat)

    def _alive(self) -> None:
        self._tell_standby(PrimaryHeard(number=-1))

    # ---- from the standby -----------------------------------------------------------

    def answer(self, number: int) -> None:
        """Tell the primary that everything up to this record is durable."""
        answered = StandbyAnswered(number=number)
        self._network.carry(lambda: self.primary.act(lambda: self._answered(answered)))

    def _answered(self, answered: StandbyAnswered) -> None:
        if self._is_of(self.primary):
            self.primary.give(answered)

    # ---- its end --------------------------------------------------------------------

    def close(self) -> None:
        """End the stream. Each end that lives notices."""
        if not self.open:
            return
        self.open = False
        self._batch = None
        disk = self.primary.disk
        disk.send = disk.send_later = None
        self._network.carry(lambda: self.primary.act(self._left))
        self._network.carry(lambda: self.standby.act(self._lost))

    def _left(self) -> None:
        if self.primary.life == self._lives[0] and self.primary.line in (None, self):
            self.primary.line = None
            self.primary.give(StandbyLost())

    def _lost(self) -> None:
        if self.standby.life == self._lives[1] and self.standby.line in (None, self):
            self.standby.line = None
            self.standby.give(PrimaryLost())

    def _reaches_standby(self) -> bool:
        return self._is_of(self.standby)

    def _is_of(self, node: Node) -> bool:
        lives = self.primary.life, self.standby.life
        at = 0 if node is self.primary else 1
        return self.open and node.line is self and lives[at] == self._lives[at]

    def _tell_standby(self, event: StandbyEvent) -> bool:
        """Give the standby an event of this stream; False if it is not its stream."""
        here = self._reaches_standby()
        if here:
            self.standby.give(event)
        return here
