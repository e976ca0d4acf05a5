"""Safety of merges: nothing is merged twice, and nothing is twice in an island."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.records import Durable, Joined, Merged
from diloco_jax.protocol.values import Contribution, Outstanding, Version
from diloco_jax.simulation.faults.arrays import Anchor, Delta
from diloco_jax.simulation.faults.observing import Incarnation, Invariant, Key


class MergedOnce(Invariant):
    """No take and no step of an incarnation enters two merges of a fragment.

    In a new term another process may have joined as an incarnation, before the first
    one of that name came.
    """

    name = "merged_once"
    effects = (Merge,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._sessions: dict[Incarnation, str] = {}
        """Session of the process that joined last, by incarnation."""
        self._through: dict[tuple[Incarnation, str, int], int] = defaultdict(int)

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Merge):
                for c in effect.contributions:
                    through = self._through[self._whose(c, effect.fragment)]
                    self.hold(c.start >= through, "merged through {}:", through, c)

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Joined):
            self._sessions[record.island, record.incarnation] = record.session
        elif isinstance(record, Merged):
            for c in record.contributions:
                whose = self._whose(c, record.fragment)
                self.hold(c.start >= self._through[whose], "merged again:", c)
                self._through[whose] = c.end

    def _whose(self, c: Contribution, fragment: int) -> tuple[Incarnation, str, int]:
        who = c.island, c.incarnation
        return who, self._sessions[who], fragment


class KeptOnce(Invariant):
    """An island adopts no version beside a delta that is in that version.

    Otherwise the delta would be in the island's parameters twice.
    """

    name = "kept"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._last_takes: dict[tuple[Incarnation, int], Key] = {}
        self._merged: dict[Key, Version] = {}

    def took(self, who: Incarnation, take: Outstanding, delta: Delta) -> None:
        self._last_takes[who, take.fragment] = (*who, take.fragment, take.tick)

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Merged):
            for c in record.contributions:
                key = (c.island, c.incarnation, record.fragment, c.tick)
                self._merged[key] = record.version

    def adopted(
        self, who: Incarnation, fragment: int, anchor: Anchor, *, kept: bool
    ) -> None:
        if kept:
            take = self._last_takes[who, fragment]
            merged = self._merged.get(take)
            self.hold(
                merged is None or merged > anchor.version,
                "{} adopts {} beside {}, which is in {}",
                who,
                anchor.version,
                take,
                merged,
            )
