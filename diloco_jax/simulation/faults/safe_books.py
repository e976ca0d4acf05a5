"""Safety of the books: tokens, data, and the contents of the log.

Only islands of the config come in, and those that an operator let in. None counts as
faster than the config allows, and none that tells the truth about its steps is put out
for that. The run does not end before what its islands made last is in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.ending import OPEN_BY
from diloco_jax.protocol.coordinator.events import Tell
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig, State
from diloco_jax.protocol.holding import Commit
from diloco_jax.protocol.messages import (
    Finished,
    FromCoordinator,
    Granted,
    Progress,
    Published,
    Refused,
    Stop,
    TakeRequest,
    TakeVerdict,
    Welcome,
)
from diloco_jax.protocol.records import (
    Admitted,
    Durable,
    Joined,
    Left,
    Merged,
    Removed,
    Stopping,
    TermBegun,
)
from diloco_jax.protocol.values import Contribution, EndReason, Version
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.observing import Incarnation, Invariant, Key

Process = tuple[Incarnation, str]
"""Incarnation and session: two processes may have one name."""


class LedgerExact(Invariant):
    """Merged, lost and open steps balance at every event, and progress never goes back.

    The merged tokens are those of the log. At the end all computed tokens are merged,
    lost, or carried from an earlier term, whose log is gone.
    """

    name = "ledger"
    effects = (Progress,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._seen: tuple[Fragment | None, ...] = (None,) * config.fragments
        self._merged: dict[tuple[int, str], int] = defaultdict(int)
        self._steps: dict[Incarnation, int] = {}
        self._progress = 0

    def carrying_out(self, effect: AnyEffect) -> None:
        match effect:
            case Tell(message=Progress(tokens=tokens)):
                self.hold(tokens >= self._progress, "progress goes back:", effect)
                self._progress = tokens

    def stepped(self, state: State, changed: Sequence[Island], *, writes: bool) -> None:
        if state.fragments is self._seen:
            return
        seen, self._seen = self._seen, state.fragments
        # Incarnations come and go by records, and all fragments' books with them.
        pairs = zip(state.fragments, seen, strict=True)
        moved = [f for f, before in pairs if writes or f is not before]
        wrong = ledger.check(state, moved)
        self.hold(not wrong, "the books:", *wrong)

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Merged):
            for c in record.contributions:
                self._merged[record.fragment, c.island] += c.tokens
        elif isinstance(record, TermBegun):
            for name, tokens in record.lost_tokens.items():
                self._merged[record.fragment, name] -= tokens

    def trained(self, who: Incarnation, step: int, positions: np.ndarray) -> None:
        self._steps[who] = step + 1

    def recovered(self, state: State) -> None:
        self._progress = 0  # Steps that were reported but not merged come again.
        self.stepped(state, (), writes=False)
        for fragment in state.fragments:
            for name, account in fragment.accounts.items():
                merged = self._merged[fragment.index, name]
                self.hold(
                    account.merged_tokens == merged,
                    "fragment {}, island {}: the log has {} merged tokens, the "
                    "recovered books {}",
                    fragment.index,
                    name,
                    merged,
                    account.merged_tokens,
                )

    def opened(self, opened: Opened) -> None:
        self._merged.clear()

    def finished(self, state: State) -> None:
        self.recovered(state)
        for name, island in state.islands.items():
            steps = sum(n for who, n in self._steps.items() if who[0] == name)
            computed = island.computed_tokens
            self.hold(
                computed <= steps * island.tokens_per_step,
                "island {}: {} tokens computed, but it made {} steps",
                name,
                computed,
                steps,
            )
            for fragment in state.fragments:
                account = fragment.accounts[name]
                settled = account.merged_tokens + sum(account.lost_tokens.values())
                settled += account.carried_tokens
                self.hold(
                    settled == computed,
                    "fragment {}, island {}: {} tokens are merged, lost or carried at "
                    "the end, of {} computed",
                    fragment.index,
                    name,
                    settled,
                    computed,
                )


class DataOnce(Invariant):
    """An island trains on the data that it was durably granted, in order.

    A share of the data is granted to one incarnation at a time, and no longer once a
    merge has it. What an ended incarnation had is granted again unless a merge has it.

    If a term was lost before any offering island heard of it, its number is used again.
    The grants of the lost term are lost with it. A process that joined only that term
    is let in if it did not hear of the term either, and begins anew. Its name may be
    that of an earlier process, which goes on with its own grants. What was granted in
    any lost term and never told may be granted again.
    """

    name = "data"
    effects = (Granted,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._sessions: dict[Incarnation, str] = {}
        """Session of the process that joined last, by incarnation."""
        self._current: dict[str, int] = {}
        self._granted: dict[Process, list[int]] = {}
        self._held: dict[Incarnation, set[int]] = {}
        self._per_step: dict[Incarnation, int] = {}
        self._merged: dict[int, Incarnation] = {}
        self._term = 0
        self._before: dict[Process, tuple[int, list[int]]] = {}
        """Grants of processes that joined this term: the number of positions that they
        carried from earlier terms, and all earlier positions.
        """
        self._lost: dict[Process, list[int]] = {}
        """Positions granted in a lost term, until the process joins again."""
        self._void: set[Process] = set()
        """Processes that joined only a lost term."""
        self._given: set[int] = set()
        """Positions granted in this term."""
        self._untold: set[int] = set()
        """Those of them of which nobody was told."""

    def carrying_out(self, effect: AnyEffect) -> None:
        match effect:
            case Tell(message=Granted(span=span)):
                self._untold.difference_update(range(span.start, span.stop))

    def opened(self, opened: Opened) -> None:
        for held in self._held.values():
            held -= self._untold
        self._given, self._untold = set(), set()
        term = opened.anchors[0].version.term
        if term == self._term:
            for process, (carried, before) in self._before.items():
                who, lost = process[0], self._granted[process]
                self._held[who] = set(lost[:carried])
                self._granted[process], self._lost[process] = before, lost
                if not carried:
                    self._void.add(process)
                    for position in lost:
                        if self._merged.get(position) == who:
                            del self._merged[position]
        self._term, self._before = term, {}

    def persisted(self, record: Durable) -> None:
        match record:
            case Joined():
                who = (record.island, record.incarnation)
                process = who, record.session
                self._current[record.island] = record.incarnation
                self._sessions[who] = record.session
                # Its grants of an earlier term, as far as it heard of them.
                carried = record.carried.sequences_granted if record.carried else 0
                is_void = bool(carried) and process in self._void
                self.hold(not is_void, "no process heard of its term:", record)
                self._void.discard(process)
                self._lost.pop(process, None)
                before = self._granted.get(process, [])
                self._before.setdefault(process, (carried, before))
                self._granted[process] = before[:carried]
                self._held[who] = set(before[:carried])
                self._per_step[who] = record.sequences_per_step
            case Left():
                del self._held[record.island, record.incarnation]
            case records.Granted():
                self._grant(record)
            case Merged():
                for c in record.contributions:
                    self._merge(c)

    def trained(self, who: Incarnation, step: int, positions: np.ndarray) -> None:
        """See Invariant. Until one has joined the term, it may be any process of the
        name.
        """
        count, drawn = self._per_step[who], positions.tolist()
        begin, end = step * count, (step + 1) * count
        known = self._process(who)
        if known in self._before and self._granted[known][begin:end] == drawn:
            return
        processes = [known] if known in self._before else list(self._granted)
        granted = [
            positions_of[process][begin:end]
            for process in processes
            for positions_of in (self._granted, self._lost)
            if process[0] == who and process in positions_of
        ]
        what = "it trains a step on positions that are not those granted:"
        self.hold(drawn in granted, what, who, step, drawn, granted)

    def recovered(self, state: State) -> None:
        known = self._merged.keys() | set().union(*self._held.values())
        for span in state.free_spans:
            known |= set(range(span.start, span.stop))
        lost = self._given - known
        self.hold(not lost, "neither free, nor held, nor merged:", sorted(lost))

    def finished(self, state: State) -> None:
        self.recovered(state)

    def _process(self, who: Incarnation) -> Process:
        return who, self._sessions[who]

    def _grant(self, record: records.Granted) -> None:
        who = (record.island, self._current[record.island])
        granted = self._granted[self._process(who)]
        positions = range(record.start, record.stop)
        follows = record.offset == len(granted)
        self.hold(
            follows,
            "an island with so many positions is granted:",
            who,
            len(granted),
            record,
        )
        for holder, held in self._held.items():
            apart = held.isdisjoint(positions)
            self.hold(apart, "has part of what is granted:", holder, record)
        self.hold(
            self._merged.keys().isdisjoint(positions), "part of it is merged:", record
        )
        self._held[who].update(positions)
        self._given.update(positions)
        self._untold.update(positions)
        granted.extend(positions)

    def _merge(self, c: Contribution) -> None:
        who = (c.island, c.incarnation)
        process = self._process(who)
        is_void = process in self._void
        self.hold(not is_void, "no process heard of its term:", c)
        count = self._per_step[who]
        for position in self._granted[process][c.start * count : c.end * count]:
            merged = self._merged.setdefault(position, who)
            if merged != who:
                what = "a position that was merged from two:"
                self.hold(False, what, position, who, merged)


class DurableFirst(Invariant):
    """Everything that an island can see is in the log before it can see it, as the
    newest that is there.
    """

    name = "durable"
    effects = (
        Commit,
        Welcome,
        Granted,
        TakeRequest,
        Published,
        TakeVerdict,
        Stop,
        Finished,
    )

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._who: dict[str, Incarnation] = {}
        """Incarnations by session."""
        self._incarnations: dict[str, int] = {}
        self._grants: set[tuple[str, int, int, int]] = set()
        self._versions = [Version()] * config.fragments
        self._merged: set[Key] = set()
        self._ticks = 0
        self._kinds: set[type[Durable]] = set()

    def opened(self, opened: Opened) -> None:
        self._who, self._incarnations, self._kinds = {}, {}, set()
        self._versions = [f.version for f in opened.state.fragments]
        self._ticks = 0

    def persisted(self, record: Durable) -> None:
        self._kinds.add(type(record))
        match record:
            case Joined():
                self._who[record.session] = (record.island, record.incarnation)
                self._incarnations[record.island] = record.incarnation
            case records.Granted():
                key = record.island, self._incarnations[record.island]
                self._grants.add((*key, record.start, record.stop))
            case Merged(fragment=fragment):
                self._versions[fragment] = record.version
                for c in record.contributions:
                    key = (c.island, c.incarnation)
                    self._merged.add((*key, fragment, c.tick))
            case TermBegun(fragment=fragment):
                self._versions[fragment] = record.version
            case records.Ticks(through=through):
                self._ticks = through

    def carrying_out(self, effect: AnyEffect) -> None:
        match effect:
            case Commit(fragment=fragment, version=version):
                durable = self._versions[fragment] == version
            case Tell(session=session, message=message):
                durable = self._is_durable(self._who.get(session), message)
            case _:
                return
        self.hold(durable, "visible before it is in the log:", effect)

    def _is_durable(self, who: Incarnation | None, message: FromCoordinator) -> bool:
        match message:
            case Welcome(versions=versions):
                return self._is_in(who) and list(versions) == self._versions
            case Granted(span=span):
                return who is not None and (*who, *span) in self._grants
            case TakeRequest(tick=tick):
                return tick <= self._ticks
            case Published(fragment=fragment, version=version, verdict=verdict):
                if version != self._versions[fragment]:
                    return False
                return verdict != "merged" or self._is_merged(who, message)
            case TakeVerdict(verdict="merged"):
                return self._is_merged(who, message)
            case Stop():
                return Stopping in self._kinds
            case Finished():
                return records.Finished in self._kinds
            case _:
                return True

    def _is_in(self, who: Incarnation | None) -> bool:
        return who is not None and self._incarnations[who[0]] == who[1]

    def _is_merged(
        self, who: Incarnation | None, message: Published | TakeVerdict
    ) -> bool:
        return (
            who is not None and (*who, message.fragment, message.tick) in self._merged
        )


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


class SpeedsKept(Invariant):
    """No step time below the config's is believed, whatever an island says.

    No island of these worlds says that it made steps that it did not make, so none is
    refused for such a claim.
    """

    name = "speeds"
    effects = (Refused,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._least_s = config.least_seconds

    def stepped(self, state: State, changed: Sequence[Island], *, writes: bool) -> None:
        for island in changed:
            name, step_s = island.name, island.step_seconds
            least_s = self._least_s.get(name, 0.0) * island.sequences_per_step
            believed = not 0 < step_s < least_s
            self.hold(believed, "too fast:", name, step_s, "s, is", least_s)

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell) and isinstance(effect.message, Refused):
                refused = effect.message
                self.hold(refused.code != "claims", "refused:", refused.message)


ENDS: tuple[EndReason, ...] = ("finished", "absent")


class LastStepsMerged(Invariant):
    """The end of a run costs no island its steps, unless it is silent for longer than a
    lease meanwhile, its step outlasts the flush, or a delta of its own hangs for the
    flush's share in which others are not to wait for it.

    Deltas that are refused, and steps that an adoption undoes, are lost by other
    reasons.
    """

    name = "last_steps"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._exempt: set[Incarnation] = set()
        """Those that were silent for too long, or had a delta that hung."""
        self._awaited: dict[tuple[Incarnation, int], float] = {}
        """Times since which islands' deltas of fragments are awaited: they are on their
        way, or are taken after an adoption that is, once or again."""

    def ending(self, before: State, after: State, now: float) -> None:
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
                what = "the run ends, and loses so many tokens of who is there:"
                self.hold(not lost, what, lost, name, island.status, fragment.index)

    def _look_for_hanging(self, state: State, now: float) -> None:
        awaited = {
            ((name, account.incarnation), fragment.index)
            for fragment in state.fragments
            for name, account in fragment.accounts.items()
            if (take := account.take) is not None and not take.arrived
        }
        self._awaited = {key: self._awaited.get(key, now) for key in awaited}
        for (who, _), since in self._awaited.items():
            if now - since >= OPEN_BY * self.config.flush_s:
                self._exempt.add(who)


def _lost(fragment: Fragment, name: str) -> int:
    lost = fragment.accounts[name].lost_tokens
    return sum(lost.get(reason, 0) for reason in ENDS)
