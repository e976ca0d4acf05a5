"""Safety of merges: the deltas that may enter one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.events import Note, Persist, Tell
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import TakeRequest
from diloco_jax.protocol.records import (
    Durable,
    Fact,
    Joined,
    Left,
    Merged,
    Skipped,
    Stopping,
    Tick,
)
from diloco_jax.protocol.values import Contribution, DeltaKey, Outstanding, Version
from diloco_jax.simulation.faults.arrays import Delta
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.observing import Incarnation, Invariant, Key


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
