"""The decision for a step boundary, the order of actions there, and the books of it.

A decision is one value without arrays, which wait in the shell by fragment and version.
Host 0 makes it from the messages it received. The other hosts, the tape's replay and
the simulator's islands act on the same value, all through `Boundary`, each with its own
`Arrays`, `Incoming`, `Outgoing` and `LeasedData`. Grants, progress and a new term come
first, then verdicts, then adoptions and takes in the order of the adopt rule.

The books of an incarnation say which of its steps are in which take: a take at step s
covers the half-open interval [start, s). Every change is a `Record`: the coordinator
puts it on the tape and keeps its ledger from it.

A fragment is *unsettled* from its take until the adoption of a version that may contain
the take. Until then its local value is anchor - delta + later steps, so a second take
would count the first one's steps again. A version at which the coordinator called the
delta pending certainly lacks it. Such a version is adopted beside the delta, under a
rule that keeps the delta (docs/design/pending_deltas.md).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import (
    FIRST_VERSION,
    AnchorRequest,
    EndReason,
    Fields,
    Measures,
    Outstanding,
    Record,
    RecordKind,
    Span,
    TakeRequest,
    TakeVerdict,
    Verdict,
    Version,
    Watch,
)

RESTARTS = ("non_finite", "out_of_bounds", "miscounted", "quarantined", "future")
"""Reasons of a refusal after which the fragment restarts from the anchor."""

TakeOutcome = Literal["none", "settled", "reopened", "dropped", "reset"]
"""The consequence of a verdict for the arrays of the fragment.

none: nothing. settled: the delta is merged, and its residual stays. reopened: the take
is undone. dropped: the steps are lost, and the residual from before the take returns; a
kept delta leaves the local value with the next version.
reset: as dropped, and the local value returns to the anchor, because it is unusable or
repeats steps of the anchor."""

AdoptOutcome = Literal["none", "adopted", "kept"]
"""Result of an adoption. none: the version is not newer. kept: adopted beside the delta
of the last take."""


class AdoptTraits(Protocol):
    """The facts about an adopt rule that books and boundaries depend on: those of
    `core.families.AdoptRule`."""

    adopts_first: bool
    """True if a boundary with both adopts a fragment before taking it."""
    keeps_pending: bool
    """True if a version known to lack the last delta is adopted beside that delta."""
    loses_steps: bool
    """True if an adoption undoes the steps since the take."""


@dataclasses.dataclass
class _Account:
    version: Version
    start: int
    rates_before: float = 0.0
    """Sum of the learning rates of the steps before `start`."""
    tick: int = -1
    take: Outstanding | None = None
    unsettled: bool = False
    late: int = -1
    """Tick of a take, made or requested, that is in no version up to `pending_at`."""
    pending_at: Version = FIRST_VERSION
    kept: bool = False
    """True if the local value has the last take beside a version that lacks it."""


class Books:
    """Intervals, outstanding takes and records of one incarnation.

    versions: of the anchors that the incarnation begins with, by fragment.
    """

    def __init__(self, versions: Sequence[Version], traits: AdoptTraits) -> None:
        self._accounts = [_Account(version, start=0) for version in versions]
        self.traits = traits
        self._rates = 0.0
        """Sum of the learning rates of all steps."""
        self._next_seq = 1
        self._new: list[Record] = []

    def begin(self) -> None:
        """Note every fragment that the incarnation begins with, adopted at step 0."""
        for fragment, account in enumerate(self._accounts):
            self._record("adopted", 0, fragment=fragment, version=account.version)

    def version(self, fragment: int) -> Version:
        """Return the version of the fragment's anchor."""
        return self._accounts[fragment].version

    def versions(self) -> list[Version]:
        """Return the versions of all anchors, by fragment."""
        return [account.version for account in self._accounts]

    def outstanding(self) -> tuple[Outstanding, ...]:
        """Return the takes without a final verdict."""
        return tuple(a.take for a in self._accounts if a.take is not None)

    def must_wait(self, fragment: int) -> bool:
        """Tell whether a take must wait for an adoption because the last take is
        merged, or was too old."""
        account = self._accounts[fragment]
        return account.take is None and account.unsettled

    def stepped(self, learning_rate: float) -> None:
        """Note a step at that learning rate."""
        self._rates += learning_rate

    def take(self, fragment: int, tick: int, step: int) -> Outstanding | None:
        """Open a take of [start, step); None if this request is to be ignored.

        A request is ignored if its tick repeats or the fragment has an outstanding
        take.
        """
        account = self._accounts[fragment]
        if account.take is not None or tick == account.tick:
            return None
        assert not account.unsettled, f"fragment {fragment}: ask must_wait first"
        take = Outstanding(
            fragment=fragment,
            tick=tick,
            start=account.start,
            end=step,
            base=account.version,
            seq=self._next_seq,
            rate_sum=self._rates - account.rates_before,
        )
        account.take, account.tick = take, tick
        self._restart(account, step)
        account.unsettled, account.kept = True, False
        self._record(
            "took",
            step,
            fragment=fragment,
            tick=tick,
            start=take.start,
            version=take.base,
            rate_sum=take.rate_sum,
        )
        return take

    def adopt(self, fragment: int, version: Version, step: int) -> AdoptOutcome:
        """Note an adoption and return its outcome."""
        account = self._accounts[fragment]
        if version <= account.version:
            return "none"
        account.version = version
        late = account.late == account.tick and version <= account.pending_at
        account.kept = self.traits.keeps_pending and account.unsettled and late
        if account.kept:
            tick = account.tick
            self._record("adopted", step, fragment=fragment, version=version, tick=tick)
            return "kept"
        account.unsettled = False
        if self.traits.loses_steps:
            self._restart(account, step)
        self._record("adopted", step, fragment=fragment, version=version)
        return "adopted"

    def judge(
        self,
        fragment: int,
        tick: int,
        verdict: Verdict,
        reason: str,
        step: int,
        version: Version = FIRST_VERSION,
    ) -> TakeOutcome:
        """Note the verdict on a take, sent at that version of the fragment; return
        "none" unless the verdict ends the outstanding take."""
        account = self._accounts[fragment]
        take = account.take
        if verdict == "pending":
            account.late, account.pending_at = tick, version
        if take is None or take.tick != tick or verdict == "pending":
            return "none"
        account.take = None
        if verdict == "merged":
            return "settled"
        if reason in RESTARTS or (reason == "overlap" and account.unsettled):
            self._restart(account, step)
            account.unsettled = False
            self._record("reset", step, fragment=fragment, tick=tick)
            return "reset"
        # While a newer version is on its way, the next one would be stale again.
        behind = reason == "stale" and account.version < version
        if account.unsettled and not (account.kept and behind):
            account.start, account.unsettled = take.start, behind
            account.rates_before -= take.rate_sum
            account.late = -1
            self._record("reopened", step, fragment=fragment, tick=tick)
            return "reopened"
        account.late = -1  # The next version is adopted without it.
        self._record("dropped", step, fragment=fragment, tick=tick)
        return "dropped"

    def new_term(self, step: int) -> list[Outstanding]:
        """Drop all outstanding takes and return them: a coordinator that lost its state
        cannot know whether they are in the anchors of the new term. Note the step from
        which the new books hold this incarnation's steps."""
        dropped = []
        for fragment, account in enumerate(self._accounts):
            account.late = -1
            if account.take is not None:
                dropped.append(account.take)
                self._record("dropped", step, fragment=fragment, tick=account.take.tick)
                account.take = None
            self._record("carried", step, fragment=fragment, start=account.start)
        return dropped

    def granted(self, span: Span, step: int) -> None:
        """Note granted positions of data."""
        self._record("granted", step, start=span.start, stop=span.stop)

    def progress(self, others_tokens: int, step: int) -> None:
        """Note the others' tokens on which the learning rate is based from now on."""
        self._record("progress", step, value=others_tokens)

    def restored(
        self,
        incarnation: int,
        steps: int,
        fragments: Iterable[int],
        unheard: Iterable[Fields | msgspec.UnsetType],
    ) -> None:
        """Note that the incarnation begins with an earlier one's moments after `steps`
        steps, and with its residuals of these fragments. unheard: records up to there
        that it passes on."""
        source = {"start": incarnation, "value": steps}
        self._record("restored", 0, **source)
        for fragment in fragments:
            self._record("restored", 0, fragment=fragment, **source)
        for record in unheard:
            self._record("restored", 0, unheard=record, **source)

    def drain(self) -> tuple[Record, ...]:
        """Return the records since the last call, oldest first."""
        new, self._new = tuple(self._new), []
        return new

    def _restart(self, account: _Account, step: int) -> None:
        """Begin the fragment's next delta at `step`."""
        account.start, account.rates_before = step, self._rates

    def _record(self, kind: RecordKind, step: int, **fields: Any) -> None:
        self._new.append(Record(seq=self._next_seq, kind=kind, step=step, **fields))
        self._next_seq += 1


class Ending(NamedTuple):
    """Reason for the loop to end now: `text` for people, `reason` for the books."""

    exit_code: int
    text: str
    reason: EndReason = "failed"


class Adoption(NamedTuple):
    """A version that all hosts of the island have."""

    fragment: int
    version: Version


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything to act upon at one boundary."""

    takes: tuple[TakeRequest, ...] = ()
    """The newest take request for each fragment, with its own `after`."""
    adoptions: tuple[Adoption, ...] = ()
    verdicts: tuple[TakeVerdict, ...] = ()
    grants: tuple[Span, ...] = ()
    anchors: tuple[AnchorRequest, ...] = ()
    """Requests for anchors, one for each fragment."""
    watches: tuple[Watch, ...] = ()
    """Versions at the cycle that the island is to watch."""
    term: int = 0
    """The new term, which begins new books; 0: no term began."""
    others_tokens: int = 0
    """Tokens of the other islands, and of this one's earlier incarnations."""
    heard: int = 0
    """Number of the coordinator's answers so far."""
    again: bool = False
    """Decide once more before the next step."""
    save: bool = False
    """Write a checkpoint of the state after this boundary."""
    stop: bool = False
    """The run has its tokens, or the island is about to leave: no more steps."""
    leaving: bool = False
    """The island is about to leave: write a checkpoint, and answer takes only."""
    finished: bool = False
    """The run is over."""
    lacking: tuple[int, ...] = ()
    """Fragments whose last versions did not come before the run was over."""
    ending: Ending | None = None
    """The loop must end."""

    def is_news(self, now: Decision) -> bool:
        """Tell whether it changes anything for an island that acted on `now` last."""
        return bool(
            self.takes
            or self.adoptions
            or self.verdicts
            or self.grants
            or self.anchors
            or self.term
            or (self.stop, self.leaving, self.finished, self.ending)
            != (now.stop, now.leaving, now.finished, now.ending)
        )


class Ahead:
    """Decisions that take effect `lookahead` boundaries later, when all hosts of the
    island have them."""

    def __init__(self, lookahead: int) -> None:
        self._decided = collections.deque([Decision()] * lookahead)
        self._now = Decision()

    def next(self, fresh: Decision) -> Decision:
        """Return the decision for this boundary, at which `fresh` is made."""
        self._decided.append(fresh)
        self._now = self._decided.popleft()
        return self._now

    @property
    def pending(self) -> bool:
        """True while a decision that changes anything is still to take effect."""
        return any(decision.is_news(self._now) for decision in self._decided)


class Arrays(Protocol):
    """The boundary's view of a model copy; see `exchange.Replica`."""

    def take(self, fragment: int) -> Any:
        """Return the fragment's encoded delta."""

    def adopt(self, arrival: Any, *, keep: bool) -> None:
        """Adopt a published fragment. keep: the last take is not in it, and stays in
        the local values."""

    def judge(self, fragment: int, outcome: TakeOutcome) -> None:
        """Apply the outcome of the outstanding take: merged (settled), undone
        (reopened), lost (dropped), or lost with the local values, which return to the
        anchor (reset)."""


class Incoming(Protocol):
    """Published fragments that wait for a decision to adopt them."""

    def pick(self, fragment: int, version: Version) -> Any:
        """Remove and return the arrivals that lead to this version, for
        `Arrays.adopt`.
        """


class Outgoing(Protocol):
    """Sender of encoded deltas; neither call waits."""

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        """Send an encoded delta, and keep it until `forget`."""

    def forget(self, fragment: int, tick: int) -> None:
        """Drop a delta: the verdict on its take is final."""


class LeasedData(Protocol):
    """`data.reader.LeasedStream`, or its `LeasedPositions` alone."""

    def grant(self, span: Span) -> None:
        """Add positions after those granted before."""


class RefusedTake(NamedTuple):
    """A take that is not merged, and the outcome for its steps; for people."""

    fragment: int
    tick: int
    reason: str
    outcome: TakeOutcome


class _Due(NamedTuple):
    tick: int
    step: int


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the run, and of one step of this island; steps of a cycle."""

    total_tokens: int
    tokens_per_step: int
    steps_per_cycle: int

    def share_done(self, step: int, others_tokens: int) -> float:
        """Return the share of the run's tokens that is done before `step`. It is too
        high for a moment after another island lost steps."""
        return (others_tokens + step * self.tokens_per_step) / self.total_tokens

    def may_step(self, step: int, others_tokens: int, *, stop: bool) -> bool:
        """Tell whether `step` is to be made. stop: the coordinator said that the run
        has its tokens, or the island is about to leave."""
        return not stop and self.share_done(step, others_tokens) < 1


class Watching:
    """The cycle that one incarnation watches. Each version of it is copied while it is
    the anchor: before the adoption that would replace it, or after the one that brings
    it. Once all fragments are copied, the copies are evaluated between steps.

    copy: copies the anchor of a fragment, in the place of an earlier cycle's.
    """

    def __init__(self, fragments: int, copy: Callable[[int], None]) -> None:
        self.cycle = 0
        """The cycle that is copied or evaluated; 0 before the first turn."""
        self._fragments, self._copy = fragments, copy
        self._wanted: dict[int, Version] = {}
        self._copied: set[int] = set()

    @property
    def evaluates(self) -> bool:
        """True while all fragments of the cycle are copied, and not evaluated yet."""
        return len(self._copied) == self._fragments

    def ask(self, watch: Watch) -> None:
        """Note the version of a fragment at a cycle. A new cycle takes the place of one
        that is not complete; one under evaluation is finished first."""
        if watch.cycle < self.cycle or self.evaluates:
            return
        if watch.cycle > self.cycle:
            self.cycle = watch.cycle
            self._wanted, self._copied = {}, set()
        self._wanted[watch.fragment] = watch.version

    def see(self, books: Books) -> None:
        """Copy the anchors that are wanted, of those that the island has now."""
        for fragment, version in list(self._wanted.items()):
            if books.version(fragment) == version:
                self._copy(fragment)
                self._copied.add(fragment)
                del self._wanted[fragment]

    def evaluated(self) -> None:
        """Note that the copies are evaluated: the next turn may come."""
        self._wanted, self._copied = {}, set()


class Boundary:
    """The acts of one incarnation at its boundaries, as decisions say."""

    def __init__(
        self,
        books: Books,
        goal: Goal,
        *,
        arrays: Arrays,
        incoming: Incoming,
        outgoing: Outgoing,
        data: LeasedData,
        watching: Watching | None = None,
    ) -> None:
        """watching: of an island that can evaluate the merged model."""
        self.books = books
        self.others_tokens = 0
        """Tokens of the other islands, as of the last boundary."""
        self._goal, self._stop = goal, False
        self._arrays, self._data, self._watching = arrays, data, watching
        self._incoming, self._outgoing = incoming, outgoing
        self._takes: dict[int, _Due] = {}
        """Takes that are delayed or wait for an adoption, by fragment."""

    def act(self, decision: Decision, step: int) -> list[RefusedTake]:
        """Act on a decision, at the boundary before `step`; return the refused takes,
        for people."""
        self._stop = decision.stop
        for span in decision.grants:
            self.books.granted(span, step)
            self._data.grant(span)
        if decision.others_tokens != self.others_tokens:
            self.others_tokens = decision.others_tokens
            self.books.progress(self.others_tokens, step)
        if decision.term:
            self._begin_term(step)
        # A refusal before an adoption resets the base that the adoption uses.
        judged = [self._judge(verdict, step) for verdict in decision.verdicts]
        for request in decision.takes:
            self._request(request, step)
        self._watch(decision.watches)
        if self.books.traits.adopts_first:
            self._adopt(decision.adoptions, step)
            self._take(step)
        else:
            self._take(step)
            self._adopt(decision.adoptions, step)
        self._watch(())
        return [refused for refused in judged if refused is not None]

    def may_step(self, step: int) -> bool:
        """Tell whether `step` is to be made after this boundary."""
        return self._goal.may_step(step, self.others_tokens, stop=self._stop)

    def status(self, step: int, measures: Measures) -> Status:
        """Return the status after this boundary."""
        return Status(
            phase="training" if self.may_step(step) else "stopped",
            steps=step,
            outstanding=self.books.outstanding(),
            versions=tuple(self.books.versions()),
            measures=measures,
            watches=self._watching is not None and not self._watching.evaluates,
        )

    def _watch(self, watches: tuple[Watch, ...]) -> None:
        """Copy what is to be watched of the anchors that the island has now: an
        adoption replaces them."""
        if self._watching is not None:
            for watch in watches:
                self._watching.ask(watch)
            self._watching.see(self.books)

    def _begin_term(self, step: int) -> None:
        self._takes = {}
        for take in self.books.new_term(step):
            self._outgoing.forget(take.fragment, take.tick)
            self._arrays.judge(take.fragment, "dropped")

    def _request(self, request: TakeRequest, step: int) -> None:
        before = self._takes.get(request.fragment)
        due = step + min(request.after, self._goal.steps_per_cycle)
        # A repeated request for a delayed take does not delay it again.
        if before is not None and before.tick == request.tick:
            due = min(due, before.step)
        self._takes[request.fragment] = _Due(request.tick, due)

    def _take(self, step: int) -> None:
        """Make the takes that are due: after their delay in steps, or at once if no
        steps follow, but not before the adoption that they wait for."""
        if not self._takes:
            return
        last = not self.may_step(step)
        for fragment, due in list(self._takes.items()):
            if (due.step > step and not last) or self.books.must_wait(fragment):
                continue
            del self._takes[fragment]
            if self.books.take(fragment, due.tick, step) is not None:
                encoded = self._arrays.take(fragment)
                self._outgoing.put(fragment, due.tick, encoded)

    def _adopt(self, adoptions: tuple[Adoption, ...], step: int) -> None:
        for fragment, version in adoptions:
            arrival = self._incoming.pick(fragment, version)
            adopted = self.books.adopt(fragment, version, step)
            if adopted != "none":
                self._arrays.adopt(arrival, keep=adopted == "kept")

    def _judge(self, verdict: TakeVerdict, step: int) -> RefusedTake | None:
        fragment, tick = verdict.fragment, verdict.tick
        outcome = self.books.judge(
            fragment, tick, verdict.verdict, verdict.reason, step, verdict.version
        )
        if outcome == "none":
            return None
        self._outgoing.forget(fragment, tick)
        self._arrays.judge(fragment, outcome)
        if outcome == "settled":
            return None
        return RefusedTake(fragment, tick, verdict.reason, outcome)
