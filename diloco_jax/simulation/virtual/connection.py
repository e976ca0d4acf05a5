"""Connection by which the coordinator reaches an incarnation, in virtual time."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Protocol

from diloco_jax.protocol.coordinator.events import Event
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.messages import FromCoordinator, Hello
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.simulation.virtual.line import Line
from diloco_jax.simulation.virtual.merging import VirtualFetch
from diloco_jax.wire.errors import Refused, WireError

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

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """Return the newest version of a fragment; None if its worker is away. want: of
        which the island has heard."""


@dataclasses.dataclass(frozen=True, eq=False)
class Connection:
    """A control stream between an incarnation and the coordinator's `Sessions`."""

    island: VirtualIsland
    line: Line
    hello: Hello

    def send(self, message: FromCoordinator) -> None:
        """Send a message on its way to the island."""
        self.line.send_down(functools.partial(self.island.received, message))

    def close(self, refused: Refused | None = None) -> None:
        """Turn the island away if it is refused; otherwise it was replaced."""
        if refused is not None:
            reason = f"refused: {refused.message}"
            self.line.send_down(lambda: self.island.turned_away(reason))

    def fail(self, error: WireError) -> None:
        """End the connection; the island comes again."""
        self.island.postponed(self)
