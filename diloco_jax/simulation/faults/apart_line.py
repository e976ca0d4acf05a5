"""A line between a lead and its worker on another machine, and the network below."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco_jax.protocol.holding import (
    BeginWorker,
    FromWorker,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.simulation.faults.schedule import LEASE_S
from diloco_jax.simulation.virtual.clock import Clock

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.apart_lead import LedWorker
    from diloco_jax.simulation.faults.apart_worker import ApartWorker

WORKERS_SILENCE_S = 2 * LEASE_S
"""Silence of its lead after which a worker leaves the line."""
LEADS_SILENCE_S = 3 * LEASE_S
"""Silence of a worker after which the lead leaves the line."""


class WorkerNetwork:
    """The network between a worker and its lead, for all their lines."""

    def __init__(self, clock: Clock, latency_s: float) -> None:
        self.clock, self.latency_s = clock, latency_s
        self.parted = False
        self.line: DialledLine | None = None
        """The last line over it."""
        self._waiting: list[Callable[[], None]] = []
        self._cuts = 0

    def carry(self, arrive: Callable[[], None]) -> None:
        """Let a message arrive a latency from now, but not before the end of a
        partition."""
        self.clock.after(self.latency_s, lambda: self._land(arrive))

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

    def cut(self, for_s: float) -> None:
        """Let nothing come through for a while."""
        self.parted = True
        self._cuts += 1
        cut = self._cuts

        def silent(side: Callable[[DialledLine], None]) -> None:
            if self.parted and self._cuts == cut and self.line is not None:
                side(self.line)

        self.clock.after(WORKERS_SILENCE_S, lambda: silent(DialledLine.leave))
        self.clock.after(LEADS_SILENCE_S, lambda: silent(DialledLine.give_up))
        self.clock.after(for_s, self.heal)


class DialledLine:
    """One line from a lead to a worker, from its dial to its end."""

    def __init__(
        self,
        lead: LedWorker,
        worker: ApartWorker,
        network: WorkerNetwork,
        begin: BeginWorker,
        asked: RestoreFragments,
    ) -> None:
        self.begin, self.asked, self.files = begin, asked, lead.files
        self._lead, self._worker, self._network = lead, worker, network
        self._open = True
        """At the worker's end."""
        network.line = self

    def dial(self) -> None:
        """Come to the worker's machine, if the lead lives until then."""

        def come() -> None:
            if self._lead.wants(self):
                self._worker.come(self)

        self._network.carry(lambda: self._lead.act(come))

    def tell(self, message: ToHolder) -> None:
        """Send the worker a message."""
        self._network.carry(lambda: self._worker.hear(self, message))

    def say(self, message: FromWorker) -> None:
        """Send the lead a message."""
        if self._open:
            self._carry(lambda: self._lead.hear(self, message))

    def part(self) -> None:
        """Close the worker's end. The lead notices."""
        self._close()
        self._carry(lambda: self._lead.lose_line(self))

    def refuse(self) -> None:
        """Tell the lead that the worker obeys another one."""
        self._close()
        self._carry(lambda: self._lead.is_refused(self))

    def hang_up(self, *, ends: bool) -> None:
        """Close the lead's end. ends: a worker that this lead has is to end."""

        def notice() -> None:
            if ends and self._open and self._worker.line is self:
                self._worker.end_process()
            self._close()

        self._network.carry(notice)

    def give_up(self) -> None:
        """Close the lead's end after silence."""
        self._lead.act(lambda: self._lead.lose_line(self))

    def leave(self) -> None:
        """Close the worker's end, if the worker has it, after silence."""
        if self._worker.line is self:
            self.part()

    def is_of(self, coordinator: object) -> bool:
        """Tell whether it is the line of this coordinator."""
        return self._lead.leading.coordinator is coordinator

    def _close(self) -> None:
        self._open = False
        self._worker.lose_line(self)

    def _carry(self, arrive: Callable[[], None]) -> None:
        self._network.carry(lambda: self._lead.act(arrive))
