"""An island's connections, and their present faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from diloco_jax.simulation.virtual.clock import Clock, Line, LineSpeed

Way = Literal["up", "down"]
Ways = frozenset[Way]
UP, DOWN = Ways({"up"}), Ways({"down"})
BOTH = UP | DOWN

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

    def send_up(self, arrive: Callable[[], None]) -> None:
        self._send(UP, arrive)

    def send_down(self, arrive: Callable[[], None]) -> None:
        self._send(DOWN, arrive)

    def upload(self, nbytes: int, arrive: Callable[[], None]) -> None:
        self._transfer(UP, arrive)

    def download(self, nbytes: int, arrive: Callable[[], None]) -> None:
        self._transfer(BOTH, arrive)

    def _send(self, way: Ways, arrive: Callable[[], None]) -> None:
        network = self._network
        at = self._clock.now + network.latency_s + network.control_late_s
        at = self._in_order[way] = max(at, self._in_order[way])
        self._carry(at, way, arrive)

    def _transfer(self, ways: Ways, arrive: Callable[[], None]) -> None:
        network = self._network
        at = self._clock.now + network.transfer_s + network.bulk_late_s
        if not network.corrupts:
            self._carry(at, ways, arrive)
            return

        def again() -> None:
            if self.open:
                self._transfer(ways, arrive)

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
