"""Safety of the door: only islands of the config, and those that an operator let in."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.events import Persist
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.records import Admitted, Durable, Joined, Removed
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.observing import Invariant


class DoorKept(Invariant):
    """No island is in the run that neither the config nor an operator let in.

    What an operator ordered survives any crash. A new term begins without it.
    """

    name = "door"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._of_config = frozenset(config.admitted or ())
        self._admitted: set[str] = set()

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Admitted):
            self._admitted.add(record.island)
        elif isinstance(record, Removed):
            self._admitted.discard(record.island)
        elif isinstance(record, Joined):
            self._check(record.island, "joined")

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        if not any(isinstance(effect, Persist) for effect in effects):
            self._equal(state, "decided")
            for name, island in state.islands.items():
                if island.status != "gone":
                    self._check(name, island.status)

    def recovered(self, state: State) -> None:
        self._equal(state, "recovered")

    def opened(self, opened: Opened) -> None:
        self._admitted = set()

    def _equal(self, state: State, when: str) -> None:
        same = set(state.admitted) == self._admitted
        self.hold(same, when, state.admitted, "log:", self._admitted)

    def _check(self, name: str, what: str) -> None:
        known = name in self._of_config or name in self._admitted
        self.hold(known, "was not let in, and is there:", name, what)
