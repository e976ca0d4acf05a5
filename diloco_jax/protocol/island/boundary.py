"""The decision for a step boundary, and the order of actions there, for all shells.

A decision is one value without arrays, which wait in the shell by fragment and version.
Host 0 makes it from the messages it received. The other hosts, the tape's replay and
the simulator act on the same value.

Grants, progress and a new term come first, then verdicts, then adoptions and takes in
the order of the adopt rule. The train loop, the simulator's virtual islands and replay
all act through `Boundary`, each with its own `Arrays`, `Incoming`, `Outgoing` and
`LeasedData`.

An island's turn at the merged model (`Watching`) follows from decisions, so all its
hosts come to the same. The coordinator names the versions of one cycle, fragment by
fragment (`Watch`). Each is copied while it is the anchor: before the adoption that
would replace it, or after the one that brings it. Once all fragments of the cycle are
copied, the copies are evaluated between steps.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from diloco_jax.protocol.island.books import Books, Outcome
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import (
    AnchorRequest,
    Measures,
    TakeRequest,
    TakeVerdict,
    Watch,
)
from diloco_jax.protocol.values import EndReason, Span, Version


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
    """Decisions that take effect `lead` boundaries later, when all hosts of the island
    have them."""

    def __init__(self, lead: int) -> None:
        self._decided = collections.deque([Decision()] * lead)
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
    """The boundary's view of a model copy; see `replica.Replica`."""

    def take(self, fragment: int) -> Any:
        """Return the fragment's encoded delta."""

    def adopt(self, arrival: Any, *, keep: bool) -> None:
        """Adopt a published fragment. keep: the last take is not in it, and stays in
        the local values."""

    def judge(self, fragment: int, outcome: Outcome) -> None:
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
    outcome: Outcome


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
    """The cycle that one incarnation watches.

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
        judged = [self._settle(verdict, step) for verdict in decision.verdicts]
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

    def _settle(self, verdict: TakeVerdict, step: int) -> RefusedTake | None:
        fragment, tick = verdict.fragment, verdict.tick
        outcome = self.books.settle(
            fragment, tick, verdict.verdict, verdict.reason, step, verdict.version
        )
        if outcome == "none":
            return None
        self._outgoing.forget(fragment, tick)
        self._arrays.judge(fragment, outcome)
        if outcome == "settled":
            return None
        return RefusedTake(fragment, tick, verdict.reason, outcome)
