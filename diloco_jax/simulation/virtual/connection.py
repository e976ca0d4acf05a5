"""Connection by which the coordinator reaches an incarnation, in virtual time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from diloco_jax.protocol.coordinator.events import Event
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import FromCoordinator, Hello, Refused
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.simulation.virtual.line import Line
from diloco_jax.simulation.virtual.merging import VirtualFetch

if TYPE_CHECKING:
    from diloco_jax.simulation.virtual.island import VirtualIsland


class VirtualService(Protocol):
    """Service that an island is connected to: a coordinator, or a gatherer.

    A `coordinator.VirtualCoordinator` serves; a gatherer of anchors does not serve yet.
    """

    @property
    def serves(self) -> bool:
        """True if anything can be fetched."""

    @property
    def config(self) -> PolicyConfig:
        """Config of the run's decisions."""

    def hello(self, hello: Hello, peer: Connection) -> None:
        """Judge an island on a new connection."""

    def hear(self, event: Event) -> None:
        """Hear a message of an island."""

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """Take in a delta, all of whose bytes have arrived."""

    def fetch(self, fragment: int, have: Version | None) -> VirtualFetch:
        """Return the newest version of a fragment."""


@dataclasses.dataclass(frozen=True, eq=False)
class Connection:
    """`coordinator.Peer`: an incarnation, reached on one line."""

    island: VirtualIsland
    line: Line
    status: Status
    """Status with which the incarnation said hello."""

    @property
    def name(self) -> str:
        return self.island.name

    @property
    def session(self) -> str:
        return self.island.session

    def receive(self, message: FromCoordinator) -> None:
        if isinstance(message, Refused):
            reason = f"refused: {message.message}"
            self.line.send_down(lambda: self.island.turned_away(reason))
        else:
            self.line.send_down(lambda: self.island.received(message))
