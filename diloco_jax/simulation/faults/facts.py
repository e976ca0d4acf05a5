"""Facts of a run as one observer sees them: from durable records and the acts of
islands, never from the state of the code that is checked. The invariants that keep long
books of facts are here too: of data, and of the end of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.ending import OPEN_BY
from diloco_jax.protocol.coordinator.search import FoundTerm
from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig, State
from diloco_jax.protocol.messages import (
    Contribution,
    EndReason,
    Granted,
    Hello,
    Version,
)
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


# ---- invariants with long books of their own --------------------------------------

Process = tuple[Incarnation, str]
"""Incarnation and session: two processes may have one name."""
ENDS: tuple[EndReason, ...] = ("finished", "absent")


class GrantedData:
    """The invariant "data": who was granted which positions, and has heard of that.

    What a lost term granted, and nobody has heard of, may be granted again. If a term
    was lost before any offering island heard of it, its number is used again, and all
    that it granted may be: a process that heard of it begins anew.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._heard: dict[Process, list[int]] = {}
        """Positions that a process was told of, in their order."""
        self._count: dict[Incarnation, int] = {}
        """Number of positions that were granted, and carried from earlier terms."""
        self._held: dict[Incarnation, set[int]] = {}
        self._merged: dict[int, Incarnation] = {}
        self._term = 0
        self._given: set[int] = set()
        """Positions granted in this term."""

    def _hold(self, holds: bool, what: str, *values: object) -> None:
        self._facts.hold("data", holds, what, *values)

    def heard(self, process: Process, granted: Granted) -> None:
        """Note that a process hears of a grant; it may hear so twice."""
        heard, span = self._heard.setdefault(process, []), granted.span
        if granted.offset == len(heard):
            heard.extend(range(span.start, span.stop))

    def opened(self, opened: Opened) -> None:
        """Begin a term, and let go of what the last one had granted."""
        term, gone = opened.anchors[0].version.term, self._given
        if term != self._term:
            gone = gone.difference(*self._heard.values())
        for held in self._held.values():
            held -= gone
        for position in gone & self._merged.keys():
            del self._merged[position]
        self._term, self._given = term, set()

    def joined(self, record: records.Joined) -> None:
        """Begin with the grants of an earlier term, as far as it heard of them."""
        who = (record.island, record.incarnation)
        carried = record.carried.sequences_granted if record.carried else 0
        heard = self._heard.get((who, record.session), [])
        self._hold(carried <= len(heard), "it heard of fewer:", len(heard), record)
        self._count[who], self._held[who] = carried, set(heard[:carried])

    def left(self, record: records.Left) -> None:
        """Let go of what an incarnation had."""
        del self._held[record.island, record.incarnation]

    def granted(self, record: records.Granted) -> None:
        """Check that nobody else has these positions, and no merge."""
        who = (record.island, self._facts.log.current[record.island])
        positions = range(record.start, record.stop)
        count, what = self._count[who], "an island with so many positions is granted:"
        self._hold(record.offset == count, what, who, count, record)
        for holder, held in self._held.items():
            apart = held.isdisjoint(positions)
            self._hold(apart, "has part of what is granted:", holder, record)
        unmerged = self._merged.keys().isdisjoint(positions)
        self._hold(unmerged, "part of it is merged:", record)
        self._held[who].update(positions)
        self._given.update(positions)
        self._count[who] += len(positions)

    def merged(self, c: Contribution) -> None:
        """Note the positions of a merged delta."""
        who, joined = who_took(c), self._facts.joined[who_took(c)]
        count, heard = joined.sequences_per_step, self._heard[who, joined.session]
        for position in heard[c.start * count : c.end * count]:
            merged = self._merged.setdefault(position, who)
            what = "a position that was merged from two:"
            self._hold(merged == who, what, position, who, merged)

    def trained(self, process: Process, step: int, drawn: list[int]) -> None:
        """Check that a step is on what was granted, in its order."""
        begin = step * len(drawn)
        heard = self._heard[process][begin : begin + len(drawn)]
        what = "it trains a step on positions that are not those granted:"
        self._hold(drawn == heard, what, process, step, drawn, heard)

    def recovered(self, state: State) -> None:
        """Check that nothing that was granted is lost."""
        known = self._merged.keys() | set().union(*self._held.values())
        for span in state.free_spans:
            known |= set(range(span.start, span.stop))
        lost = self._given - known
        self._hold(not lost, "neither free, nor held, nor merged:", sorted(lost))


class LastSteps:
    """The invariant "last_steps": what the end of a run costs."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._exempt: set[Incarnation] = set()
        """Those that were silent for too long, or had a delta that hung."""
        self._awaited: dict[tuple[Incarnation, int], float] = {}
        """Times since which islands' deltas of fragments are awaited: they are on their
        way, or are taken after an adoption that is, once or again."""

    def ending(self, before: State, after: State, now: float) -> None:
        """Look at a step once the run stops, and at what its end loses."""
        for name, island in before.islands.items():
            if island.status == "absent" and now >= island.lease_until:
                self._exempt.add((name, island.incarnation))
        self._look_for_hanging(before, now)
        if after.phase != "done":
            return
        for name, island in before.islands.items():
            who = name, island.incarnation
            trains = island.phase == "training" and now >= before.deadline
            if island.status == "gone" or trains or who in self._exempt:
                continue
            for was, fragment in zip(before.fragments, after.fragments, strict=True):
                lost = _lost(fragment, name) - _lost(was, name)
                self._facts.hold(
                    "last_steps",
                    not lost,
                    "the run ends, and loses so many tokens of who is there:",
                    *(lost, name, island.status, fragment.index),
                )

    def _look_for_hanging(self, state: State, now: float) -> None:
        awaited = {
            ((name, account.incarnation), fragment.index)
            for fragment in state.fragments
            for name, account in fragment.accounts.items()
            if (take := account.take) is not None and not take.arrived
        }
        self._awaited = {key: self._awaited.get(key, now) for key in awaited}
        for (who, _), since in self._awaited.items():
            if now - since >= OPEN_BY * self._facts.config.flush_s:
                self._exempt.add(who)


def _lost(fragment: Fragment, name: str) -> int:
    lost = fragment.accounts[name].lost_tokens
    return sum(lost.get(reason, 0) for reason in ENDS)
