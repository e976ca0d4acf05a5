"""Safety of the door: only islands of the config, and those that an operator let in."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_jax.protocol.coordinator.islands import Island
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
        self._anew = True
        """Whether all islands are to be looked at, since the log has changed."""

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Admitted):
            self._admitted.add(record.island)
        elif isinstance(record, Removed):
            self._admitted.discard(record.island)
        elif isinstance(record, Joined):
            self._check(record.island, "joined")

    def stepped(self, state: State, changed: Sequence[Island], *, writes: bool) -> None:
        anew, self._anew = self._anew, writes
        if writes:
            return
        self._equal(state, "decided")
        for island in state.islands.values() if anew else changed:
            if island.status != "gone":
                self._check(island.name, island.status)

    def recovered(self, state: State) -> None:
        self._equal(state, "recovered")

    def opened(self, opened: Opened) -> None:
        self._admitted, self._anew = set(), True

    def _equal(self, state: State, when: str) -> None:
        same = self._admitted == set(state.admitted)
        self.hold(same, when, state.admitted, "log:", self._admitted)

    def _check(self, name: str, what: str) -> None:
        known = name in self._of_config or name in self._admitted
        self.hold(known, "was not let in, and is there:", name, what)
