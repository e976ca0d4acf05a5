"""Safety: the invariants that hold at every event, whatever fails.

`Monitor` sees a run as a stream of observations, and raises `ViolationError` with the
name of the invariant that does not hold. It sees each observation before it is among
the facts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from diloco_jax.coordinator.lead import AnyEffect
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import (
    MERGES_KNOWN,
    Fragment,
    Note,
    Persist,
    PolicyConfig,
    State,
    Tell,
)
from diloco_jax.protocol.holding import Commit, KeepFragment, Merge
from diloco_jax.protocol.island.boundary import RESTARTS
from diloco_jax.protocol.messages import (
    FIRST_VERSION,
    Contribution,
    DeltaKey,
    Finished,
    FromCoordinator,
    Granted,
    Outstanding,
    Progress,
    Published,
    Refused,
    Stop,
    TakeRequest,
    TakeVerdict,
    Version,
    Welcome,
)
from diloco_jax.protocol.records import (
    DeltaRefused,
    Durable,
    Fact,
    Joined,
    Merged,
    Skipped,
    Stopping,
    TermBegun,
    Tick,
)
from diloco_jax.simulation.faults.arrays import Anchor, Delta
from diloco_jax.simulation.faults.facts import (
    Facts,
    GrantedData,
    Incarnation,
    Key,
    LastSteps,
    Logged,
    Opened,
    key_of,
    who_took,
)

INVARIANTS = {
    # Merges.
    "merged_once": "No take and no step of a process enters two merges of a fragment.",
    "kept": "An island adopts no version beside a delta that is in that version.",
    "deltas": "Deltas and their merges hold exactly the steps and versions of books.",
    "quorum": "K deltas of islands that a tick asked, and have not ended, enter a "
    "merge, unless fewer than K that it first asked could answer for a while, or it "
    "found the fragment open a cycle later, or is one of the flush, whose last merge "
    "of a fragment needs none.",
    "recorded": "An island's records up to its take are on the tape before the merge.",
    "fenced": "Nothing is merged that comes from an incarnation after its end, but for "
    "deltas that are on the record of its end, and no lower one joins after a higher.",
    "held": "A merge has only deltas that arrived in the present life of their "
    "fragment's worker. While a fragment is lost, no tick or merge is about it.",
    "stale": "A merged delta's base lags by at most `max_staleness`, in one term.",
    "bounds": "No delta that was refused as unfit is merged in the coordinator's life, "
    "and none that is too long beside honest ones, which are at most their steps long.",
    "honest": "No delta is refused that is as long as the sum of its learning rates.",
    "quarantine": "No delta of a quarantined island enters a merge that begins then, "
    "after any crash; a new term begins without quarantines.",
    # Versions.
    "versions": "Every durable merge makes the next version, and a coordinator goes on "
    "there. A new term is above all that the offering islands know, and goes on at the "
    "highest version that one which stayed offered.",
    "adopted": "No adopted version goes back, on an island or as a coordinator starts.",
    "anchors": "A version has one value everywhere; a term begins with an adopted one.",
    "ticks": "A tick's number names one fragment's deltas of one life, each take once.",
    "cycles": "A kept cycle has the versions of the last merges up to their turns.",
    "gathered": "A fragment that was lost, and no other, begins the next term with an "
    "adopted anchor, and exactly what was merged above it is lost.",
    "liars": "No anchor that an island made up begins a term, but for one that too few "
    "others could check, of which people are told.",
    # The disk.
    "prepared": "What a record commits is whole on the disk before the record is.",
    "chains": "Publishes lead from each kept snapshot of the term to the last merge.",
    "restored": "A coordinator comes up with exactly the committed versions.",
    "durable": "All that an island can see is in the log before, as the newest there.",
    # The books.
    "ledger": "Merged, lost and open steps balance at every event, merged tokens are "
    "those of the log, and progress never goes back. At the end all computed tokens "
    "are merged, lost, or carried from an earlier term, whose log is gone.",
    "data": "An island trains on the data that it was durably granted, in order. Data "
    "is granted to one incarnation at a time, and not once a merge has it; what an "
    "ended one had is granted again unless a merge has it.",
    "door": "Only islands are in that the config or an operator let in, after any "
    "crash; a new term begins without an operator's orders.",
    "speeds": "No step time below the config's is believed, and nobody is refused for "
    "such a claim: no island of these worlds claims steps that it did not make.",
    "last_steps": "The end of a run costs no island its steps, unless it is silent for "
    "a lease, its step outlasts the flush, or a delta of its own hangs for the flush's "
    "share in which others are not to wait for it.",
}
"""Promises that must hold, by the name of the invariant."""
READS_LOG = (Merge, KeepFragment, Tell)
"""Effects that are looked at beside the records that come before them in a step."""
FEWEST = 2
"""Honest others beside which a lie must be seen."""
ROUNDING = 1e-9
"""Relative error of sums of learning rates."""


class Monitor(Facts):
    """Observer of a run. Records are those of the log; steps count from 0."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        count = config.fragments
        self._data, self._last_steps = GrantedData(self), LastSteps(self)
        self._islands: Mapping[str, Island] = {}
        """Islands after the last step."""
        self._seen: tuple[Fragment | None, ...] = (None,) * count
        """Fragments after the last step."""
        self._wrote = True
        """Whether the log has changed since the last step without records."""
        self._merged_tokens: dict[tuple[int, str], int] = defaultdict(int)
        """Merged tokens in the log, by fragment and island."""
        self._steps: dict[Incarnation, int] = {}
        self._progress = 0
        self._grants: set[tuple[str, int, int, int]] = set()
        self._through: dict[tuple[Incarnation, str, int], int] = defaultdict(int)
        """Step of a process up to which merges of a fragment have its steps."""
        self._taped: dict[Incarnation, int] = defaultdict(int)
        """Number of the last record of an island on the tape."""
        self._takes_taped: set[Key] = set()
        self._life = 0
        self._tick_uses: dict[int, tuple[int, int]] = {}
        """Fragment and life of the coordinator in which a tick was used."""
        self._kept_to = [0] * count
        """Last turn that was kept of each fragment."""
        self._newest = [Version()] * count
        """Newest version that an island adopted."""
        self._newest_of: dict[tuple[Incarnation, int], Version] = {}
        self._values: dict[tuple[int, Version], bytes] = {}
        self._begin_life()
        self._begin_term([(FIRST_VERSION,)] * count)

    def _begin_life(self) -> None:
        """Begin with what does not outlive a coordinator."""
        self._asked: dict[int, set[str]] = {}
        """Islands that a tick asked."""
        self._asked_first: dict[int, tuple[State, set[str]]] = {}
        """Those that were asked as a tick began, in a step that led to this state, and
        of which no delta was refused since."""
        self._late: set[int] = set()
        """Ticks whose fragments were open for a cycle, those of which too few first
        asked could answer for a while, and those of the flush."""
        self._held: set[DeltaKey] = set()
        self._dead: set[int] = set()
        """Fragments whose worker is dead."""
        self._away: set[int] = set()
        """Fragments that are lost, until an anchor is on the disk."""
        self._prepared: dict[tuple[int, Version], str] = {}
        """Digests by fragment and version."""
        self._refused: set[Key] = set()

    def _begin_term(self, names: Sequence[Sequence[Version]]) -> None:
        """Begin with what does not outlive a lost state. names: versions under which
        islands may have the first anchor of the term, by fragment."""
        self._counted = [{name: dict[str, int]() for name in of} for of in names]
        """Tokens by island in each version whose merges count, by fragment."""
        self._lost: set[int] = set()
        self._begun: dict[tuple[int, Version], bytes] = {}
        """Values with which lost fragments began a term."""

    # ---- what is decided ---------------------------------------------------------

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        """Observe a step of the protocol and its effects; nothing of it is visible
        yet."""
        writes = any(type(effect) is Persist for effect in effects)
        if state.islands is not self._islands:
            for one in state.fragments:
                if one.phase == "open" and one.tick in self._asked:
                    self._look_at_asked(state, one.tick)
        self._look_at_islands(state, writes=writes)
        if state.fragments is not self._seen:
            seen, self._seen = self._seen, state.fragments
            # Incarnations come and go by records, and all fragments' books with them.
            pairs = zip(state.fragments, seen, strict=True)
            moved = [f for f, before in pairs if writes or f is not before]
            wrong = ledger.check(state, moved)
            self.hold("ledger", not wrong, "the books:", *wrong)
        if not effects:
            return
        log = self.log
        if writes and any(isinstance(effect, READS_LOG) for effect in effects):
            log = log.copy()
        for effect in effects:
            match effect:
                case Persist(record=record) if log is not self.log:
                    log.add(record)
                case Merge():
                    self._merge_decided(effect, state, log)
                case KeepFragment(fragment=fragment):
                    version, tick = log.versions[fragment], log.ticks[fragment]
                    right = effect.version == version and tick <= self._turn(effect)
                    what = "it is at {}, merged at tick {}:"
                    self.hold("cycles", right, what, version, tick, effect)
                case Tell(session=session, message=TakeRequest(tick=tick)):
                    self._take_asked(session, tick, state, log)
                case Tell(message=Refused(code=code, message=why)):
                    self.hold("speeds", code != "claims", "refused:", why)
                case Note(record=Tick(fragment=fragment)):
                    here = fragment not in self._away
                    self.hold("held", here, "it is lost:", effect)
                case Note(record=Skipped(fragment=fragment, why="open")):
                    self._late.add(state.fragments[fragment].tick)
                case Note(record=DeltaRefused() as refused):
                    # It may be one that the tick, after a restart, knew nothing of.
                    tick = state.fragments[refused.fragment].tick
                    if tick in self._asked_first:
                        self._asked_first[tick][1].discard(refused.island)
                    self._delta_refused(refused)

    def _look_at_islands(self, state: State, *, writes: bool) -> None:
        """Look at the islands that a step changed; once the log has all of it, at
        those that changed since it had."""
        islands, seen, log = state.islands, self._islands, self.log
        changed: list[Island] = []
        if islands is not seen:
            self._islands = islands
            changed = [
                one for name, one in islands.items() if one is not seen.get(name)
            ]
        for island in changed:
            name, step_s = island.name, island.step_seconds
            least_s = self.config.least_seconds.get(name, 0.0)
            least_s *= island.sequences_per_step
            believed = not 0 < step_s < least_s
            self.hold("speeds", believed, "too fast:", name, step_s, "s, is", least_s)
        wrote, self._wrote = self._wrote, writes
        if writes:
            return
        for island in islands.values() if wrote else changed:
            same = island.quarantined == (island.name in log.quarantined)
            self.hold("quarantine", same, "decided:", island, "log:", log.quarantined)
            if island.status != "gone":
                self._let_in(island.name, island.status)
        self._as_ordered(state, "decided")

    def _let_in(self, name: str, what: str) -> None:
        known = name in (self.config.admitted or ()) or name in self.log.admitted
        self.hold("door", known, "was not let in, and is there:", name, what)

    def _as_ordered(self, state: State, when: str) -> None:
        admitted = self.log.admitted
        same = admitted == set(state.admitted)
        self.hold("door", same, when, state.admitted, "log:", admitted)

    def _merge_decided(self, merge: Merge, state: State, log: Logged) -> None:
        fragment, tick = merge.fragment, state.fragments[merge.fragment].tick
        # Those whose lengths count: of islands that did not leave them behind, and not
        # of the first step of a run, which has no learning rate and so no length.
        # Learning rates were others before the tick.
        measures = [
            c
            for c in merge.contributions
            if c.norm > 0 and who_took(c) not in log.ended and c.tick >= tick
        ]
        for c in merge.contributions:
            key, current = key_of(c, fragment), log.current[c.island]
            through = self._through[self._whose(c, fragment)]
            what = "merged through {}:"
            self.hold("merged_once", c.start >= through, what, through, c)
            here = c.incarnation == current and who_took(c) not in log.ended
            here |= key in log.left_behind
            self.hold("fenced", here, "incarnation {} is current:", current, c)
            self.hold("bounds", key not in self._refused, "refused before:", c)
            self._check_length(c, [o for o in measures if o.island != c.island])
            quarantined = c.island in self.log.quarantined
            self.hold("quarantine", not quarantined, "of {}:", c.island, merge)
        here = fragment not in self._away
        self.hold("held", here, "it is lost:", merge)
        self._look_at_asked(state, tick)
        self._check_quorum(merge, tick, log)

    def _check_length(self, c: Contribution, others: Sequence[Contribution]) -> None:
        if len(others) >= FEWEST and all(o.norm <= o.steps for o in others):
            most = self.config.delta_bound * max(c.steps, *(o.norm for o in others))
            what = "longer than {} beside {}:"
            self.hold("bounds", c.norm <= most, what, most, others, c)

    def _look_at_asked(self, state: State, tick: int) -> None:
        """Note whether K of those that a tick first asked can still answer."""
        _, first = self._asked_first.get(tick, (None, set[str]()))
        able = first.intersection(state.islands.standing.counted)
        if len(able - self.log.quarantined) < self.config.quorum:
            self._late.add(tick)

    def _check_quorum(self, merge: Merge, tick: int, log: Logged) -> None:
        quorum = self.config.quorum
        deltas = [c for c in merge.contributions if who_took(c) not in log.ended]
        enough = Stopping in log.kinds if merge.final else len(deltas) >= quorum
        what = "{} deltas, quorum is {}:"
        self.hold("quorum", enough, what, len(deltas), quorum, merge)
        asked = self._asked.get(tick, set())
        answers = sum(c.island in asked for c in deltas)
        late = tick in self._late
        what = "{} of those that tick {} asked, {}; quorum is {}:"
        enough = merge.final or late or answers >= quorum
        self.hold("quorum", enough, what, answers, tick, asked, quorum, merge)

    def _take_asked(self, session: str, tick: int, state: State, log: Logged) -> None:
        if Stopping in log.kinds and tick not in self._asked:
            self._late.add(tick)
        name = next(n for n, i in state.islands.items() if i.session == session)
        self._asked.setdefault(tick, set()).add(name)
        then, first = self._asked_first.setdefault(tick, (state, set()))
        if then is state:
            first.add(name)

    def _delta_refused(self, refused: DeltaRefused) -> None:
        key = (refused.island, refused.incarnation, refused.fragment, refused.tick)
        if refused.reason in RESTARTS:
            self._refused.add(key)
        delta = self.takes.get(key)
        if refused.reason == "out_of_bounds" and delta is not None and delta.honest:
            # A sum may be rounded up, and the same length be the bound.
            fit = refused.norm <= refused.most * (1 + ROUNDING)
            self.hold("honest", fit, "honest, but refused:", refused)

    def _turn(self, kept: KeepFragment) -> int:
        return (kept.cycle - 1) * self.config.fragments + kept.fragment + 1

    def _whose(self, c: Contribution, fragment: int) -> tuple[Incarnation, str, int]:
        return who_took(c), self.joined[who_took(c)].session, fragment

    def ending(self, before: State, after: State, now: float) -> None:
        """Observe a step of the protocol, at a time of its clock, once the run stops;
        nothing of it is visible yet."""
        self._last_steps.ending(before, after, now)

    # ---- what is about to be visible ---------------------------------------------

    def carrying_out(self, effect: AnyEffect) -> None:
        """Observe that an effect is about to be visible."""
        match effect:
            case Tell(session=session, message=message):
                who = self.sessions.get(session)
                durable = self._is_durable(who, message)
                self.hold("durable", durable, NOT_YET, effect)
                self._tell(message)
            case Commit(fragment=fragment, version=version):
                durable = self.log.versions[fragment] == version
                self.hold("durable", durable, NOT_YET, effect)
            case Merge():
                self._merge(effect)
            case KeepFragment(fragment=fragment):
                self._kept_to[fragment] = self._turn(effect)
            case Note(record=Fact() as fact):
                self._tape(fact)

    def _is_durable(self, who: Incarnation | None, message: FromCoordinator) -> bool:
        log = self.log
        match message:
            case Welcome(versions=versions):
                is_in = who is not None and log.current[who[0]] == who[1]
                return is_in and list(versions) == log.versions
            case Granted(span=span):
                return who is not None and (*who, *span) in self._grants
            case TakeRequest(tick=tick):
                return tick <= log.through[0]
            case Published(fragment=fragment, verdict=verdict):
                is_durable = verdict is None or self._is_durable(who, verdict)
                return is_durable and message.version == log.versions[fragment]
            case TakeVerdict(fragment=fragment):
                key = (*who, fragment, message.tick) if who is not None else None
                return message.verdict != "merged" or key in self.merged
            case Stop():
                return Stopping in log.kinds
            case Finished():
                return records.Finished in log.kinds
        return True

    def _tell(self, message: FromCoordinator) -> None:
        match message:
            case Progress(tokens=tokens):
                grows = tokens >= self._progress
                self.hold("ledger", grows, "progress goes back:", message)
                self._progress = tokens
            case TakeRequest(fragment=fragment, tick=tick):
                use = (fragment, self._life)
                first = self._tick_uses.setdefault(tick, use)
                what = "a tick has a second (fragment, life); this, and the first:"
                self.hold("ticks", first == use, what, tick, use, first)

    def _merge(self, merge: Merge) -> None:
        into, most = merge.version, self.config.max_staleness
        whose = [who_took(c) for c in merge.contributions]
        in_order = bool(whose) and whose == sorted(set(whose))
        self.hold("deltas", in_order, "a merge of", whose)
        for c in merge.contributions:
            taped = key_of(c, merge.fragment) in self._takes_taped
            self.hold("recorded", taped, "its take is not on the tape:", c)
            lag = into.number - 1 - c.base.number
            in_time = c.base.term == into.term and 0 <= lag <= most
            what = "merged into {}, max_staleness is {}:"
            self.hold("stale", in_time, what, into, most, c)
        # Until the lead hears of it, a worker that is dead gets orders all the same.
        if merge.fragment not in self._dead:
            lost = [key for key in merge.deltas if key not in self._held]
            self.hold("held", not lost, "its worker does not have", *lost)

    def _tape(self, fact: Fact) -> None:
        who, record = (fact.island, fact.incarnation), fact.record
        through = self._taped[who]
        what = "records are missing on the tape of this island, after:"
        self.hold("recorded", record.seq <= through + 1, what, who, through, record)
        self._taped[who] = max(through, record.seq)
        if record.kind == "took":
            self._takes_taped.add((*who, record.fragment, record.tick))

    # ---- what is on the disk -----------------------------------------------------

    def persisted(self, record: Durable) -> None:
        """Observe that a record is on the disk."""
        match record:
            case Joined():
                self._join(record)
            case records.Left():
                self._data.left(record)
            case records.Granted():
                self._data.granted(record)
                key = record.island, self.log.current[record.island]
                self._grants.add((*key, record.start, record.stop))
            case Merged():
                self._check_prepared(record)
                self._commit(record)
            case TermBegun():
                self._check_prepared(record)
                self._begin_again(record)
        self.log.add(record)

    def _join(self, record: Joined) -> None:
        name, incarnation = record.island, record.incarnation
        current = self.log.current.get(name, -1)
        what = "incarnation {} of {} joins after {}"
        later = incarnation > current
        self.hold("fenced", later, what, incarnation, name, current)
        self._let_in(name, "joined")
        self._data.joined(record)
        self.joined[name, incarnation] = record
        self.sessions[record.session] = (name, incarnation)

    def _check_prepared(self, record: Merged | TermBegun) -> None:
        found = self._prepared.get((record.fragment, record.version))
        what = "on the disk is {}, and committed:"
        self.hold("prepared", found == record.digest, what, found, record)

    def _commit(self, record: Merged) -> None:
        fragment, version, tick = record.fragment, record.version, record.tick
        last, kept_to = self.log.versions[fragment], self._kept_to[fragment]
        what = "fragment {}: {} after"
        self.hold("versions", version == last.next(), what, fragment, version, last)
        what = "fragment {} is merged at tick {}, and was kept for tick {}"
        self.hold("cycles", tick > kept_to, what, fragment, tick, kept_to)
        tokens: dict[str, int] = defaultdict(int)
        for c in record.contributions:
            whose, key = self._whose(c, fragment), key_of(c, fragment)
            again = c.start < self._through[whose]
            self.hold("merged_once", not again, "merged again:", c)
            self._through[whose] = c.end
            taken = self.takes.get(key, ())[:3]
            same = (c.start, c.end, c.base) == taken
            self.hold("deltas", same, "taken as {}:", taken, c)
            self.hold("deltas", c.steps > 0, "a delta without steps:", c)
            of_steps = c.steps * self.joined[who_took(c)].tokens_per_step
            self.hold("deltas", c.tokens == of_steps, "tokens of", c)
            self._data.merged(c)
            self._merged_tokens[fragment, c.island] += c.tokens
            tokens[c.island] += c.tokens
            self.merged[key] = version
        self.merges[fragment] += 1
        self._counted[fragment][version] = tokens

    def _begin_again(self, record: TermBegun) -> None:
        fragment, counted = record.fragment, self._counted[record.fragment]
        self.hold("gathered", fragment in self._lost, "it was not lost:", record)
        self._lost.discard(fragment)
        newest = max(counted)
        follows = record.version.number == record.replaced.number
        follows &= record.version.term > newest.term
        follows &= record.replaced in list(counted)[-MERGES_KNOWN:]
        self.hold("gathered", follows, "after {}:", newest, record)
        value = self.adopted_values.get((fragment, record.replaced), b"")
        same = value.hex() == record.digest
        self.hold("gathered", same, "no island has adopted that; {}:", value, record)
        lost: dict[str, int] = defaultdict(int)
        for version in [v for v in counted if v > record.replaced]:
            for name, tokens in counted.pop(version).items():
                lost[name] += tokens
                self._merged_tokens[fragment, name] -= tokens
        same = lost == record.lost_tokens
        self.hold("gathered", same, "{} were merged after it:", dict(lost), record)
        counted[record.version] = {}
        self._begun[fragment, record.version] = value

    def prepared(self, fragment: int, version: Version, digest: str) -> None:
        """Observe that the publish of a computed merge is whole on the disk."""
        self._prepared[fragment, version] = digest
        self._away.discard(fragment)

    def cut(
        self,
        fragment: int,
        saved: Sequence[Version],
        published: Mapping[Version, bytes],
    ) -> None:
        """Observe that publishes were deleted: the versions of the snapshots of a
        fragment, and the publishes that are left.
        """
        committed = self.log.versions[fragment]
        version = min(v for v in saved if v.term == committed.term)
        what = "fragment {}: snapshots {}, committed is {}, but no publish {}"
        while version < committed:
            version = version.next()
            there = version in published
            self.hold("chains", there, what, fragment, saved, committed, version)

    # ---- lives of coordinators and workers ---------------------------------------

    def recovered(self, state: State) -> None:
        """Observe the state from which a coordinator goes on."""
        what = "fragment {}: a coordinator comes up at {}, an island has adopted {}"
        for fragment, newest, last in zip(
            state.fragments, self._newest, self.log.versions, strict=True
        ):
            index, version = fragment.index, fragment.version
            self.hold("adopted", version >= newest, what, index, version, newest)
            same = version == last
            wrong = "fragment {}: recovered {}, durable is {}"
            self.hold("versions", same, wrong, index, version, last)
        shown = {name for name, island in state.islands.items() if island.quarantined}
        apart = self.log.quarantined
        self.hold("quarantine", shown == apart, "recovered", shown, "log:", apart)
        self._as_ordered(state, "recovered")
        self._check_books(state)
        self._progress = 0  # Steps that were reported but not merged come again.
        self._life += 1
        self.log.left_behind.clear()
        self._begin_life()

    def _check_books(self, state: State) -> None:
        wrong = ledger.check(state, state.fragments)
        self.hold("ledger", not wrong, "the books:", *wrong)
        what = "fragment {}, island {}: the log has {} merged tokens, the books {}"
        for fragment in state.fragments:
            for name, account in fragment.accounts.items():
                index, found = fragment.index, account.merged_tokens
                merged = self._merged_tokens[index, name]
                same = found == merged
                self.hold("ledger", same, what, index, name, merged, found)
        self._data.recovered(state)

    def restored(self, fragment: int, anchor: Anchor) -> None:
        """Observe that a coordinator comes up with this anchor, after `recovered`."""
        committed, version = self.log.versions[fragment], anchor.version
        what = "fragment {} comes up at {}, committed is {}"
        self.hold("restored", version == committed, what, fragment, version, committed)

    def has_made_up(self, opened: Opened) -> bool:
        """Observe a term that may begin; tell whether values in it are made up."""
        for came, source in zip(opened.replaced, opened.found.anchors, strict=True):
            right = not came.is_made_up or source.island in opened.unchecked
            self.hold("liars", right, "it begins a term:", source)
        return any(came.is_made_up for came in opened.replaced)

    def opened(self, opened: Opened) -> None:
        """Observe a new term; the old log is gone."""
        versions = [fragment.version for fragment in opened.state.fragments]
        offers = opened.offers
        for index, version in enumerate(versions):
            number, replaced = version.number, opened.replaced[index].version
            offered = [offer.versions[index] for offer in offers.values()]
            right = all(version.term > offer.term for offer in offers.values())
            right &= number == replaced.number
            right &= replaced >= max(offered, default=Version())
            what = "fragment {} begins at {} from {}; offered:"
            self.hold("versions", right, what, index, version, replaced, offers)
        for key in [k for k in self._values if k[1].term == versions[0].term]:
            if key not in self.adopted_values:
                del self._values[key]  # A lost term that no island heard of.
        for fragment, found in enumerate(opened.replaced):
            self.published(fragment, found)
            self.published(fragment, opened.anchors[fragment])
            same = opened.anchors[fragment].value == found.value
            self.hold("anchors", same, "fragment {} came as", fragment, found)
        self._data.opened(opened)
        self._merged_tokens.clear()
        self._wrote = True
        before = [found.version for found in opened.replaced]
        self._begin_term(list(zip(before, versions, strict=True)))
        self.log.begin(versions)
        self.sessions.clear()

    def arrived(self, key: DeltaKey) -> None:
        """Observe that a delta has arrived at the worker of its fragment."""
        self._held.add(key)

    def worker_died(self, fragments: Sequence[int]) -> None:
        """Observe that the worker of these fragments died; the lead may not know."""
        self._held = {key for key in self._held if key.fragment not in fragments}
        self._dead |= set(fragments)

    def lost(self, fragments: Sequence[int]) -> None:
        """Observe that workers have lost these fragments, and say so."""
        self._lost |= set(fragments)
        self._away |= set(fragments)

    def finished(self, state: State) -> None:
        """Observe the end of the run."""
        self._check_books(state)
        for name, island in state.islands.items():
            steps = sum(n for who, n in self._steps.items() if who[0] == name)
            computed = island.computed_tokens
            what = "island {}: {} tokens computed, but it made {} steps"
            made = computed <= steps * island.tokens_per_step
            self.hold("ledger", made, what, name, computed, steps)
            what = "fragment {}, island {}: {} of {} tokens are settled at the end"
            for fragment in state.fragments:
                account = fragment.accounts[name]
                settled = account.merged_tokens + sum(account.lost_tokens.values())
                settled += account.carried_tokens
                same = settled == computed
                self.hold("ledger", same, what, fragment.index, name, settled, computed)

    # ---- values and islands ------------------------------------------------------

    def published(self, fragment: int, anchor: Anchor) -> None:
        """Observe that the coordinator holds a version, which islands may fetch."""
        version, found = anchor
        value = self._values.setdefault((fragment, version), found)
        what = "fragment {}, {}: value {} and {}"
        self.hold("anchors", value == found, what, fragment, version, found, value)

    def adopted(
        self, who: Incarnation, fragment: int, anchor: Anchor, *, kept: bool
    ) -> None:
        """Observe that an island adopted an anchor.

        kept: the delta of the island's last take stays beside it.
        """
        version, value = anchor
        before = self._newest_of.get((who, fragment))
        grows = before is None or version > before
        what = "{} adopts {} of fragment {} after {}"
        self.hold("adopted", grows, what, who, version, fragment, before)
        self.published(fragment, anchor)
        if kept:
            take = self.last_takes[who, fragment]
            merged = self.merged.get(take)
            once = merged is None or merged > version
            what = "{} adopts {} beside {}, which is in {}"
            self.hold("kept", once, what, who, version, take, merged)
        same = self._begun.get((fragment, version), value) == value
        self.hold("gathered", same, "{}: fragment {} is not", who, fragment, anchor)
        self._newest_of[who, fragment] = version
        self._newest[fragment] = max(self._newest[fragment], version)
        self.adopted_values[fragment, version] = value

    def took(self, who: Incarnation, take: Outstanding, delta: Delta) -> None:
        """Observe that an island took a fragment: the entry in its books, and the
        arrays.
        """
        key = (*who, take.fragment, take.tick)
        self.hold("ticks", key not in self.takes, "taken a second time:", key)
        same = (take.start, take.end, take.base) == delta[:3]
        self.hold("deltas", same, "{}:", who, take, delta)
        self.takes[key] = delta
        self.last_takes[who, take.fragment] = key

    def heard(self, who: Incarnation, session: str, granted: Granted) -> None:
        """Observe that an island hears of data that it was granted."""
        self._data.heard((who, session), granted)

    def trained(
        self, who: Incarnation, session: str, step: int, positions: np.ndarray
    ) -> None:
        """Observe that an island began a step on these positions of the data."""
        self._steps[who] = step + 1
        self._data.trained((who, session), step, positions.tolist())


NOT_YET = "visible before it is in the log:"
