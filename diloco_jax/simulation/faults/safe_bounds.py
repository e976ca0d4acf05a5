"""Safety of what enters a merge: no delta that is too long, and none of a quarantined
island. No honest delta is refused for its length.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.events import Note
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.island.books import RESTARTS
from diloco_jax.protocol.records import (
    DeltaRefused,
    Durable,
    Left,
    Quarantined,
    Released,
)
from diloco_jax.protocol.values import OUT_OF_BOUNDS, Contribution, Outstanding
from diloco_jax.simulation.faults.arrays import Delta
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.observing import Incarnation, Invariant, Key

FEWEST = 2
"""Honest others beside which a lie must be seen."""
ROUNDING = 1e-9
"""Relative error of sums of learning rates."""


class BoundsKept(Invariant):
    """No delta that was refused as unfit is merged, and none that is too long beside
    honest ones.

    An honest delta is at most as long as the number of its steps. A refusal is not
    durable: after a crash of the coordinator, a delta that comes again is judged anew,
    by what is then known of the others.
    """

    name = "bounds"
    effects = (DeltaRefused, Merge)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._refused: set[Key] = set()
        self._ended: set[Incarnation] = set()

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            match effect:
                case Note(record=DeltaRefused() as r) if r.reason in RESTARTS:
                    self._refused.add((r.island, r.incarnation, r.fragment, r.tick))
                case Merge():
                    tick = state.fragments[effect.fragment].tick
                    self._check(effect, tick)

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Left):
            self._ended.add((record.island, record.incarnation))

    def recovered(self, state: State) -> None:
        self._refused.clear()

    def _check(self, merge: Merge, tick: int) -> None:
        for c in merge.contributions:
            key = (c.island, c.incarnation, merge.fragment, c.tick)
            self.hold(key not in self._refused, "refused before:", c)
            # Learning rates were others before the tick.
            others = [
                o for o in merge.contributions if self._counts(o, c) and o.tick >= tick
            ]
            if len(others) < FEWEST or any(o.norm > o.steps for o in others):
                continue
            most = self.config.delta_bound * max(c.steps, *(o.norm for o in others))
            self.hold(c.norm <= most, "longer than {} beside {}:", most, others, c)

    def _counts(self, other: Contribution, than: Contribution) -> bool:
        """Tell whether it is of another island, which did not leave it behind. A
        length of 0 is no measure: the first step of a run has no learning rate."""
        ended = (other.island, other.incarnation) in self._ended
        return other.island != than.island and other.norm > 0 and not ended


class HonestPass(Invariant):
    """No delta is refused for its length if that is the sum of its steps' learning
    rates, whatever the island's part in the run was so far."""

    name = "honest"
    effects = (DeltaRefused,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._honest: set[Key] = set()

    def took(self, who: Incarnation, take: Outstanding, delta: Delta) -> None:
        if delta.honest:
            self._honest.add((*who, take.fragment, take.tick))

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            match effect:
                case Note(record=DeltaRefused(reason=reason) as r):
                    key = (r.island, r.incarnation, r.fragment, r.tick)
                    # A sum may be rounded up, and the same length be the bound.
                    fit = r.norm <= r.most * (1 + ROUNDING)
                    fit = fit or reason != OUT_OF_BOUNDS or key not in self._honest
                    self.hold(fit, "honest, but refused:", r)


class QuarantineKept(Invariant):
    """No delta of a quarantined island enters a merge that begins afterwards.

    This holds for all its incarnations and after any crash. A new term begins without
    quarantines.
    """

    name = "quarantine"
    effects = (Merge,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._apart: set[str] = set()
        self._anew = True
        """Whether all islands are to be looked at, since the log has changed."""

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Quarantined):
            self._apart.add(record.island)
        elif isinstance(record, Released):
            self._apart.discard(record.island)

    def stepped(self, state: State, changed: Sequence[Island], *, writes: bool) -> None:
        anew, self._anew = self._anew, writes
        if writes:
            return
        if anew:
            self._equal(state, "decided")
        for island in changed:
            same = island.quarantined == (island.name in self._apart)
            self.hold(same, "decided:", island, "log:", self._apart)

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Merge):
                within = self._apart & {c.island for c in effect.contributions}
                self.hold(not within, "of {}:", within, effect)

    def recovered(self, state: State) -> None:
        self._equal(state, "recovered")

    def _equal(self, state: State, when: str) -> None:
        shown = {name for name, island in state.islands.items() if island.quarantined}
        self.hold(shown == self._apart, when, shown, "log:", self._apart)

    def opened(self, opened: Opened) -> None:
        self._apart, self._anew = set(), True
