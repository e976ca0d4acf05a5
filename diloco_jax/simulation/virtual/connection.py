"""How the coordinator reaches an incarnation of an island, in virtual time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from diloco_jax.protocol.coordinator.events import Event
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.island.status import Status
from diloco_jax.protocol.messages import FromCoordinator, Hello, Refused
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.simulation.virtual.line import Line
from diloco_jax.simulation.virtual.merging import VirtualFetch

if TYPE_CHECKING:
    from diloco_jax.simulation.virtual.island import VirtualIsland


class VirtualService(Protocol):
    """What an island is connected to: a `coordinator.VirtualCoordinator`, or one that
    does not serve yet, since it gathers anchors."""

    @property
    def serves(self) -> bool:
        """Whether anything can be fetched."""

    @property
    def config(self) -> PolicyConfig:
        """Of the run."""

    def hello(self, hello: Hello, peer: Connection) -> None:
        """An island on a new connection."""

    def hear(self, event: Event) -> None:
        """What an island says."""

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """All bytes of a delta."""

    def fetch(self, fragment: int, have: Version | None) -> VirtualFetch:
        """The newest version of a fragment."""


@dataclasses.dataclass(frozen=True, eq=False)
class Connection:
    """`coordinator.Peer`: how an incarnation is reached on one line."""

    island: VirtualIsland
    line: Line
    status: Status
    """With which it said hello."""

    @property
    def name(self) -> str:
        """See Peer."""
        return self.island.name

    @property
    def session(self) -> str:
        """See Peer."""
        return self.island.session

    def receive(self, message: FromCoordinator) -> None:
        """See Peer."""
        if isinstance(message, Refused):
            reason = f"refused: {message.message}"
            self.line.send_down(lambda: self.island.turned_away(reason))
        else:
            self.line.send_down(lambda: self.island.received(message))
