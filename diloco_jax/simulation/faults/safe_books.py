"""Safety of the books: tokens, data, and the contents of the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import ledger
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
    Stop,
    TakeRequest,
    TakeVerdict,
    Welcome,
)
from diloco_jax.protocol.records import (
    Durable,
    Joined,
    Left,
    Merged,
    Stopping,
    TermBegun,
)
from diloco_jax.protocol.values import Contribution, Version
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
