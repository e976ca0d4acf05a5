"""The order of things between two steps: one for all shells.

Grants, progress and a new term first, then verdicts, then adoptions and takes in the
order of the adopt rule. The train loop, the virtual islands of the simulator and replay
act through `Boundary`; what stands behind `Arrays`, `Incoming`, `Outgoing` and `Data`
differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from diloco_jax.protocol.island.books import Books, Outcome
from diloco_jax.protocol.island.decision import Adoption, Decision
from diloco_jax.protocol.island.status import Status
from diloco_jax.protocol.island.stopping import Goal
from diloco_jax.protocol.messages import Measures, TakeRequest, TakeVerdict
from diloco_jax.protocol.values import Span, Version


class Arrays(Protocol):
    """A model copy, as far as boundaries change it; see `replica.Replica`."""

    def take(self, fragment: int) -> Any:
        """The fragment's encoded delta."""

    def adopt(self, arrival: Any, *, keep: bool) -> None:
        """Takes over a published fragment. keep: the last take is not in it, and stays
        in the local values."""

    def judge(self, fragment: int, outcome: Outcome) -> None:
        """The outstanding take is merged (settled), as if it had not been (reopened),
        lost (dropped), or lost with the local values, which go back to the anchor
        (reset)."""


class Incoming(Protocol):
    """Where published fragments wait until a decision has them adopted."""

    def pick(self, fragment: int, version: Version) -> Any:
        """All that leads to this version, for `Arrays.adopt`; waits no longer."""


class Outgoing(Protocol):
    """Where encoded deltas go; neither call waits."""

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        """Sends an encoded delta, and keeps it until `forget`."""

    def forget(self, fragment: int, tick: int) -> None:
        """The verdict on a take is final."""


class Data(Protocol):
    """`data.stream.LeasedStream`, or `data.positions.LeasedPositions`."""

    def grant(self, span: Span) -> None:
        """Adds positions after those granted before."""


class RefusedTake(NamedTuple):
    """A take that is not merged, and what became of its steps; for people."""

    fragment: int
    tick: int
    reason: str
    outcome: Outcome


class _Due(NamedTuple):
    tick: int
    step: int


class Boundary:
    """Acts on decisions, for one incarnation."""

    def __init__(
        self,
        books: Books,
        goal: Goal,
        *,
        arrays: Arrays,
        incoming: Incoming,
        outgoing: Outgoing,
        data: Data,
    ) -> None:
        self.books = books
        self.others_tokens = 0
        """Tokens of the other islands, as of the last boundary."""
        self._goal, self._stop = goal, False
        self._arrays, self._data = arrays, data
        self._incoming, self._outgoing = incoming, outgoing
        self._takes: dict[int, _Due] = {}
        """Takes that are put off, or wait for an adoption, by fragment."""

    def act(self, decision: Decision, step: int) -> list[RefusedTake]:
        """Acts on a decision, at the boundary before `step`; returns what a person may
        want to know."""
        self._stop = decision.stop
        for span in decision.grants:
            self.books.granted(span, step)
            self._data.grant(span)
        if decision.others_tokens != self.others_tokens:
            self.others_tokens = decision.others_tokens
            self.books.progress(self.others_tokens, step)
        if decision.term:
            self._begin_term(step)
        # A refusal known before an adoption resets the base that it goes by.
        judged = [self._settle(verdict, step) for verdict in decision.verdicts]
        for request in decision.takes:
            self._request(request, step)
        if self.books.traits.adopts_first:
            self._adopt(decision.adoptions, step)
            self._take(step)
        else:
            self._take(step)
            self._adopt(decision.adoptions, step)
        return [refused for refused in judged if refused is not None]

    def may_step(self, step: int) -> bool:
        """True if `step` is to be made after this boundary."""
        return self._goal.may_step(step, self.others_tokens, stop=self._stop)

    def status(self, step: int, measures: Measures) -> Status:
        """The status after this boundary."""
        return Status(
            phase="training" if self.may_step(step) else "stopped",
            steps=step,
            outstanding=self.books.outstanding(),
            versions=tuple(self.books.versions()),
            measures=measures,
        )

    def _begin_term(self, step: int) -> None:
        self._takes = {}
        for take in self.books.new_term(step):
            self._outgoing.forget(take.fragment, take.tick)
            self._arrays.judge(take.fragment, "dropped")

    def _request(self, request: TakeRequest, step: int) -> None:
        before = self._takes.get(request.fragment)
        # Asked again for what is put off already: it is not put off once more.
        if before is None or before.tick != request.tick:
            due = _Due(request.tick, step + request.after)
            self._takes[request.fragment] = due

    def _take(self, step: int) -> None:
        """Makes the takes that are due: after as many steps as they were put off, or
        at once when no steps follow, and not before the adoption that they wait for."""
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
