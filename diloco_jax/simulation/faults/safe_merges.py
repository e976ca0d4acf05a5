"""Safety of merges: what may enter one.

Only deltas that may, and nothing twice; no delta that is too long, and none of a
quarantined island. No honest delta is refused for its length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.events import Note, Persist, Tell
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.island.books import RESTARTS
from diloco_jax.protocol.messages import TakeRequest
from diloco_jax.protocol.records import (
    DeltaRefused,
    Durable,
    Fact,
    Joined,
    Left,
    Merged,
    Quarantined,
    Released,
    Skipped,
    Stopping,
    Tick,
)
from diloco_jax.protocol.values import (
    OUT_OF_BOUNDS,
    Contribution,
    DeltaKey,
    Outstanding,
    Version,
)
from diloco_jax.simulation.faults.arrays import Anchor, Delta
from diloco_jax.simulation.faults.gatherer import Opened
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


class DeltasExact(Invariant):
    """A delta holds exactly the steps, against exactly the version, of the books.

    The merge records the delta as the island's books do. The deltas of a merge are in
    the order of names, and of incarnations if an island left a delta behind.
    """

    name = "deltas"
    effects = (Merge,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._takes: dict[Key, tuple[int, int, Version]] = {}
        self._tokens_per_step: dict[Incarnation, int] = {}

    def carrying_out(self, effect: AnyEffect) -> None:
        if isinstance(effect, Merge):
            whose = [(c.island, c.incarnation) for c in effect.contributions]
            in_order = whose == sorted(set(whose))
            self.hold(bool(whose) and in_order, "a merge of", whose)

    def took(self, who: Incarnation, take: Outstanding, delta: Delta) -> None:
        self.hold(
            (take.start, take.end, take.base) == delta[:3],
            "{}:",
            who,
            take,
            delta,
        )
        self._takes[(*who, take.fragment, take.tick)] = delta[:3]

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Joined):
            who = (record.island, record.incarnation)
            self._tokens_per_step[who] = record.tokens_per_step
        if not isinstance(record, Merged):
            return
        for c in record.contributions:
            who = (c.island, c.incarnation)
            taken = self._takes.get((*who, record.fragment, c.tick))
            self.hold((c.start, c.end, c.base) == taken, "taken as {}:", taken, c)
            self.hold(c.steps > 0, "a delta without steps:", c)
            tokens = c.steps * self._tokens_per_step[who]
            self.hold(c.tokens == tokens, "tokens of", c)


class QuorumHeld(Invariant):
    """At least K deltas of incarnations that have not ended enter a merge.

    K of them are from islands that its tick asked, unless the tick could not ask K
    islands, or a tick of a cycle later found the fragment still open, or it is a tick
    of the flush, which comes when the run has its tokens, and begins with deltas of
    earlier ticks. The flush's last merge of a fragment is exempt.
    """

    name = "quorum"
    effects = (TakeRequest, Left, Skipped, Stopping, Merge)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._asked: dict[int, set[str]] = {}
        self._asked_first: dict[int, int] = {}
        self._late: set[int] = set()
        """Ticks whose fragments were open for a cycle, and those of the flush."""
        self._stopping = False
        self._ended: set[Incarnation] = set()

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        ended, stopping = self._ended, self._stopping
        for effect in effects:
            match effect:
                case Persist(record=Stopping()):
                    stopping = True
                case Tell(session=session, message=TakeRequest(tick=tick)):
                    if stopping and tick not in self._asked:
                        self._late.add(tick)
                    islands = state.islands.items()
                    name = next(n for n, i in islands if i.session == session)
                    self._asked.setdefault(tick, set()).add(name)
                case Persist(record=Left(island=island, incarnation=incarnation)):
                    ended = ended | {(island, incarnation)}
                case Note(record=Skipped(fragment=fragment, why="open")):
                    self._late.add(state.fragments[fragment].tick)
        if len(self._asked) > len(self._asked_first):
            for tick in self._asked.keys() - self._asked_first.keys():
                self._asked_first[tick] = len(self._asked[tick])
        for effect in effects:
            if isinstance(effect, Merge):
                tick = state.fragments[effect.fragment].tick
                deltas = [
                    c
                    for c in effect.contributions
                    if (c.island, c.incarnation) not in ended
                ]
                self._check(effect, deltas, tick, stopping=stopping)

    def recovered(self, state: State) -> None:
        self._asked, self._asked_first, self._late = {}, {}, set()

    def opened(self, opened: Opened) -> None:
        self._stopping = False

    def persisted(self, record: Durable) -> None:
        self._stopping |= isinstance(record, Stopping)
        if isinstance(record, Left):
            self._ended.add((record.island, record.incarnation))
        elif isinstance(record, Joined):
            # In a new term, which does not know of that end.
            self._ended.discard((record.island, record.incarnation))

    def _check(
        self, merge: Merge, deltas: list[Contribution], tick: int, *, stopping: bool
    ) -> None:
        quorum = self.config.quorum
        asked = self._asked.get(tick, set())
        answers = sum(c.island in asked for c in deltas)
        self.hold(
            stopping if merge.final else len(deltas) >= quorum,
            "{} deltas, quorum is {}:",
            len(deltas),
            quorum,
            merge,
        )
        late = tick in self._late or self._asked_first.get(tick, 0) < quorum
        self.hold(
            merge.final or late or answers >= quorum,
            "{} of those that tick {} asked, {}; quorum is {}:",
            answers,
            tick,
            asked,
            quorum,
            merge,
        )


class RecordedFirst(Invariant):
    """No delta is merged before the island's records up to its take are on the tape."""

    name = "recorded"
    effects = (Fact, Merge)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._through: dict[Incarnation, int] = defaultdict(int)
        self._takes: set[Key] = set()

    def carrying_out(self, effect: AnyEffect) -> None:
        if isinstance(effect, Note) and isinstance(effect.record, Fact):
            fact = effect.record
            who, record = (fact.island, fact.incarnation), fact.record
            through = self._through[who]
            follows = record.seq <= through + 1
            what = "records are missing on the tape of this island, after:"
            self.hold(follows, what, who, through, record)
            self._through[who] = max(through, record.seq)
            if record.kind == "took":
                self._takes.add((*who, record.fragment, record.tick))
        elif isinstance(effect, Merge):
            for c in effect.contributions:
                key = (c.island, c.incarnation, effect.fragment, c.tick)
                self.hold(key in self._takes, "its take is not on the tape:", c)


class FencedOut(Invariant):
    """Nothing is merged that comes from an incarnation after it was replaced or ended.

    No lower incarnation joins after a higher one. Exempt are deltas that an island left
    behind: they had arrived, they are on the record of its end, and no later
    coordinator merges them. A coordinator that lost its state knows only the islands
    that say hello.
    """

    name = "fenced"
    effects = (Left, Merge)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._current: dict[str, int] = {}
        self._ended: set[Incarnation] = set()
        self._left_behind: set[Key] = set()

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        if any(isinstance(effect, Merge) for effect in effects):
            self._merges(effects)

    def recovered(self, state: State) -> None:
        self._left_behind = set()

    def opened(self, opened: Opened) -> None:
        self._current = {}

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Joined):
            name, incarnation = record.island, record.incarnation
            current = self._current.get(name, -1)
            what = "incarnation {} of {} joins after {}"
            self.hold(incarnation > current, what, incarnation, name, current)
            self._current[name] = incarnation
            # In a new term, which does not know of that end.
            self._ended.discard((name, incarnation))
        elif isinstance(record, Left):
            who = (record.island, record.incarnation)
            self._ended.add(who)
            for delta in record.left_behind:
                self._left_behind.add((*who, delta.fragment, delta.tick))

    def _merges(self, effects: Sequence[AnyEffect]) -> None:
        """Check the merges of a step, each after the records before it."""
        then = FencedOut(self.config)
        then._current, then._ended = dict(self._current), set(self._ended)
        then._left_behind = set(self._left_behind)
        for effect in effects:
            if isinstance(effect, Persist):
                then.persisted(effect.record)
            elif isinstance(effect, Merge):
                then._check(effect)

    def _check(self, merge: Merge) -> None:
        for c in merge.contributions:
            who = (c.island, c.incarnation)
            self.hold(
                (*who, merge.fragment, c.tick) in self._left_behind
                or (
                    c.incarnation == self._current[c.island] and who not in self._ended
                ),
                "incarnation {} is current:",
                self._current[c.island],
                c,
            )


class HeldOnly(Invariant):
    """A merge has only deltas that arrived in the present life of their fragment's
    worker. While the lead knows that it is away, no tick asks for its fragments and no
    merge of them is ordered. An island that leaves is asked for all it has: the worker
    may be back in time.
    """

    name = "held"
    effects = (Tick, Merge)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._held: set[DeltaKey] = set()
        self._dead: set[int] = set()
        self._away: set[int] = set()
        """Those of the dead that the lead has heard of."""

    def arrived(self, key: DeltaKey) -> None:
        self._held.add(key)

    def worker_died(self, fragments: Sequence[int]) -> None:
        self._held = {key for key in self._held if key.fragment not in fragments}
        self._dead |= set(fragments)

    def worker_away(self, fragments: Sequence[int]) -> None:
        self._away |= set(fragments)

    def worker_back(self, fragments: Sequence[int]) -> None:
        self._dead -= set(fragments)
        self._away -= set(fragments)

    def recovered(self, state: State) -> None:
        self._held, self._dead, self._away = set(), set(), set()

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            match effect:
                case Note(record=Tick(fragment=fragment)) | Merge(fragment=fragment):
                    here = fragment not in self._away
                    self.hold(here, "its worker is away:", effect)

    def carrying_out(self, effect: AnyEffect) -> None:
        # Until the lead hears of it, a worker that is dead gets orders all the same.
        if isinstance(effect, Merge) and effect.fragment not in self._dead:
            lost = [key for key in effect.deltas if key not in self._held]
            self.hold(not lost, "its worker does not have", *lost)


class StaleOut(Invariant):
    """The base of a merged delta lags the current version by at most `max_staleness`.

    Both are of one term.
    """

    name = "stale"
    effects = (Merge,)

    def carrying_out(self, effect: AnyEffect) -> None:
        if isinstance(effect, Merge):
            into = effect.version.number - 1
            for c in effect.contributions:
                self.hold(
                    c.base.term == effect.version.term
                    and 0 <= into - c.base.number <= self.config.max_staleness,
                    "merged into {}, max_staleness is {}:",
                    effect.version,
                    self.config.max_staleness,
                    c,
                )


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
