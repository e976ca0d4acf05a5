"""Facts of a run as one observer sees them: from durable records and the acts of
islands, never from the state of the code that is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.coordinator.terms import FoundTerm
from diloco_jax.protocol.messages import Hello
from diloco_jax.protocol.records import (
    Admitted,
    Durable,
    Joined,
    Left,
    Merged,
    Quarantined,
    Released,
    Removed,
    TermBegun,
    Ticks,
)
from diloco_jax.protocol.values import Contribution, Version
from diloco_jax.simulation.faults.arrays import Anchor, Delta

Incarnation = tuple[str, int]
"""Island and incarnation."""
Key = tuple[str, int, int, int]
"""Identity of a take: island, incarnation, fragment, tick."""


class ViolationError(Exception):
    """An invariant that does not hold.

    invariant: its name. what: the observation, and what had to hold.
    """

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A new term of a coordinator that had lost its state."""

    found: FoundTerm
    state: State
    """That of a coordinator without a log."""
    anchors: tuple[Anchor, ...]
    replaced: tuple[Anchor, ...]
    """Anchors as the islands offered them."""
    offers: Mapping[str, Hello]
    """Offers of the islands that stayed to the end."""
    unchecked: frozenset[str]
    """Islands whose anchors too few others could check."""


@dataclasses.dataclass(kw_only=True)
class Logged:
    """Facts of the records of a term, up to the last one."""

    versions: list[Version]
    """Version of the last merge, by fragment."""
    ticks: list[int]
    """Tick of the last merge, by fragment; of all terms."""
    through: list[int] = dataclasses.field(default_factory=lambda: [0])
    """Ticks up to this one may be used."""
    current: dict[str, int] = dataclasses.field(default_factory=dict)
    """Incarnation that joined last, by island."""
    ended: set[Incarnation] = dataclasses.field(default_factory=set)
    """Incarnations that ended; of all terms, unless they joined again."""
    left_behind: set[Key] = dataclasses.field(default_factory=set)
    """Deltas of ended incarnations that a merge may have, in one life."""
    admitted: set[str] = dataclasses.field(default_factory=set)
    """Islands that an operator let in."""
    quarantined: set[str] = dataclasses.field(default_factory=set)
    kinds: set[type] = dataclasses.field(default_factory=set)
    """Types of the records."""

    def copy(self) -> Logged:
        """Return one to which records can be added."""
        values = vars(self)
        return Logged(**{name: value.copy() for name, value in values.items()})

    def begin(self, versions: Sequence[Version]) -> None:
        """Begin a term with these versions: the old log is gone."""
        self.versions, self.through = list(versions), [0]
        for facts in (self.current, self.admitted, self.quarantined, self.kinds):
            facts.clear()

    def add(self, record: Durable) -> None:
        """Add a record."""
        self.kinds.add(type(record))
        match record:
            case Merged(fragment=fragment):
                self.versions[fragment] = record.version
                self.ticks[fragment] = record.tick
            case TermBegun():
                self.versions[record.fragment] = record.version
            case Ticks(through=through):
                self.through = [through]
            case Joined():
                self.current[record.island] = record.incarnation
                # In a new term, which does not know of that end.
                self.ended.discard((record.island, record.incarnation))
            case Left():
                who = (record.island, record.incarnation)
                self.ended.add(who)
                for delta in record.left_behind:
                    self.left_behind.add((*who, delta.fragment, delta.tick))
            case Admitted():
                self.admitted.add(record.island)
            case Removed():
                self.admitted.discard(record.island)
            case Quarantined():
                self.quarantined.add(record.island)
            case Released():
                self.quarantined.discard(record.island)


class Facts:
    """Facts that more than one invariant reads."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        count = config.fragments
        self.log = Logged(versions=[Version()] * count, ticks=[0] * count)
        self.joined: dict[Incarnation, Joined] = {}
        """How the process joined that joined last, by incarnation; of all terms."""
        self.sessions: dict[str, Incarnation] = {}
        """Incarnations by session, of this term."""
        self.merges = [0] * count
        """Merges by fragment."""
        self.merged: dict[Key, Version] = {}
        """Version that a take is in."""
        self.takes: dict[Key, Delta] = {}
        self.last_takes: dict[tuple[Incarnation, int], Key] = {}
        """The last take of a fragment."""
        self.adopted_values: dict[tuple[int, Version], bytes] = {}
        """Values of the versions that some island adopted."""

    def hold(self, name: str, holds: bool, what: str, *values: object) -> None:
        """Raise ViolationError of this invariant unless it holds. values: put into the
        braces of `what`, others behind it; they cost nothing as long as it holds,
        unlike a formatted string.
        """
        if not holds:
            placed = what.count("{}")
            text = [what.format(*values[:placed]), *map(str, values[placed:])]
            raise ViolationError(name, " ".join(text))

    def belong_to(self, who: Incarnation, session: str) -> bool:
        """Return True unless the name and incarnation belong to another process.

        The coordinator turns a second process of a name away. Until it hears of that,
        its acts are ignored. After a disk was lost, it may be the first one.
        """
        of = self.joined.get(who)
        return of is None or of.session == session or of.session not in self.sessions


def who_took(c: Contribution) -> Incarnation:
    """Return the incarnation of a merged delta."""
    return c.island, c.incarnation


def key_of(c: Contribution, fragment: int) -> Key:
    """Return the identity of a merged delta's take."""
    return c.island, c.incarnation, fragment, c.tick
