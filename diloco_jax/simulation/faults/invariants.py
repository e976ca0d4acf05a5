"""Safety: the invariants that hold at every event, whatever fails.

Each invariant is a class that sees a run as a stream of observations (the methods of
`Invariant`) and raises `ViolationError` with its `name`. The classes keep books of
their own, from durable records and the acts of islands, and do not trust the code that
they check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.events import Note, Persist, Tell
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.records import Durable, Joined
from diloco_jax.simulation.faults import safe_books, safe_merges, safe_versions
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.observing import Incarnation, Invariant

INVARIANTS: tuple[type[Invariant], ...] = (
    safe_versions.AdoptedStays,
    safe_versions.VersionsGrow,
    safe_versions.AnchorsEqual,
    safe_versions.TicksOnce,
    safe_versions.CyclesWhole,
    safe_merges.MergedOnce,
    safe_merges.KeptOnce,
    safe_merges.DeltasExact,
    safe_merges.QuorumHeld,
    safe_merges.RecordedFirst,
    safe_merges.FencedOut,
    safe_merges.StaleOut,
    safe_merges.BoundsKept,
    safe_merges.HonestPass,
    safe_merges.QuarantineKept,
    safe_books.DoorKept,
    safe_books.SpeedsKept,
    safe_merges.HeldOnly,
    safe_books.LedgerExact,
    safe_books.DataOnce,
    safe_books.DurableFirst,
    safe_books.LastStepsMerged,
    safe_versions.PreparedFirst,
    safe_versions.ChainsKept,
    safe_versions.RestoredExactly,
    safe_versions.GatheredExactly,
)

Calls = Sequence[Callable[..., None]]

OBSERVATIONS = tuple(
    name
    for name, value in vars(Invariant).items()
    if callable(value) and not name.startswith("_") and name not in ("hold", "stepped")
)
"""A monitor is told of these. What is `stepped` follows from what is `decided`."""


class Names(Invariant):
    """Which process owns a name: the coordinator turns a second one of that name away.

    Until the second process hears of that, its acts are ignored. After a disk was lost,
    it may be the first process that is turned away.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._sessions: dict[Incarnation, str] = {}

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Joined):
            self._sessions[record.island, record.incarnation] = record.session

    def opened(self, opened: Opened) -> None:
        self._sessions.clear()

    def belong_to(self, who: Incarnation, session: str) -> bool:
        """Return True unless the name and incarnation belong to another process."""
        return self._sessions.get(who, session) == session


class Monitor(Invariant):
    """All invariants as one."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.names = Names(config)
        watchers = [self.names, *(kind(config) for kind in INVARIANTS)]
        self._watchers = {type(watcher): watcher for watcher in watchers}
        self._stepped = self._watching("stepped")
        self._islands: Mapping[str, Island] = {}
        """Islands after the last step."""
        self._deciding: dict[frozenset[type], tuple[Calls, bool]] = {}
        """Those that look at a step with these kinds of effects, and if it writes."""
        self._carrying: dict[type, Calls] = {}
        """Those that look at effects of this kind."""
        for name in OBSERVATIONS:
            if name not in ("decided", "carrying_out"):
                setattr(self, name, _all(self._watching(name)))

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        kinds = frozenset(map(_kind, effects))
        found = self._deciding.get(kinds)
        if found is None:
            writes = any(type(effect) is Persist for effect in effects)
            found = self._deciding[kinds] = self._watching("decided", kinds), writes
        calls, writes = found
        changed: list[Island] = []
        if state.islands is not self._islands:
            seen, self._islands = self._islands, state.islands
            pairs = state.islands.items()
            changed = [island for name, island in pairs if island is not seen.get(name)]
        for stepped in self._stepped:
            stepped(state, changed, writes=writes)
        for call in calls:
            call(state, effects)

    def carrying_out(self, effect: AnyEffect) -> None:
        kind = _kind(effect)
        calls = self._carrying.get(kind)
        if calls is None:
            calls = self._watching("carrying_out", frozenset({kind}))
            self._carrying[kind] = calls
        for call in calls:
            call(effect)

    def _watching(self, name: str, kinds: frozenset[type] | None = None) -> Calls:
        return [getattr(self._watchers[who], name) for who in _who_watches(name, kinds)]


@functools.cache
def _who_watches(name: str, kinds: frozenset[type] | None) -> list[type[Invariant]]:
    """Return the invariants whose method is not empty, and that look at one of these
    kinds of effects."""
    watchers: list[type[Invariant]] = [Names, *INVARIANTS]
    return [
        who
        for who in watchers
        if getattr(who, name) is not getattr(Invariant, name)
        and (kinds is None or not kinds.isdisjoint(who.effects))
    ]


def _kind(effect: AnyEffect) -> type:
    """Return the type of the message or the record in an effect, or of the effect."""
    # Ordered by how often they come.
    if isinstance(effect, Tell):
        return type(effect.message)
    if isinstance(effect, (Note, Persist)):  # A union is made anew each time.
        return type(effect.record)
    return type(effect)


def _all(calls: Calls) -> Callable[..., None]:
    if len(calls) == 1:
        return calls[0]

    def observe(*observation: Any, **facts: Any) -> None:
        for call in calls:
            call(*observation, **facts)

    return observe
