"""The books of one incarnation: which of its steps are in which take.

The books hold, per fragment, the anchor's version, the first step that is in no take
yet, and the outstanding take. Steps count from 0; a take at step s covers the half-open
interval [start, s). Every change is a `Record`: the coordinator puts it on the tape and
keeps its ledger from it. There are no arrays here: the shell applies the outcomes.

A fragment is *unsettled* from its take until the adoption of a version that may contain
the take. Until then its local value is anchor - delta + later steps, so a second take
would count the first one's steps again. A version at which the coordinator called the
delta pending certainly lacks it. Such a version is adopted beside the delta, under a
rule that keeps the delta (docs/design/pending_deltas.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from diloco_jax.protocol.values import (
    FIRST_VERSION,
    FUTURE,
    NON_FINITE,
    OUT_OF_BOUNDS,
    OVERLAP,
    QUARANTINED,
    STALE,
    Outstanding,
    Record,
    RecordKind,
    Span,
    Verdict,
    Version,
)

RESTARTS = (NON_FINITE, OUT_OF_BOUNDS, QUARANTINED, FUTURE)
"""Reasons of a refusal after which the fragment restarts from the anchor."""

Outcome = Literal["none", "settled", "reopened", "dropped", "reset"]
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

    def settle(
        self,
        fragment: int,
        tick: int,
        verdict: Verdict,
        reason: str,
        step: int,
        version: Version = FIRST_VERSION,
    ) -> Outcome:
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
        if reason in RESTARTS or (reason == OVERLAP and account.unsettled):
            self._restart(account, step)
            account.unsettled = False
            self._record("reset", step, fragment=fragment, tick=tick)
            return "reset"
        # While a newer version is on its way, the next one would be stale again.
        behind = reason == STALE and account.version < version
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

    def restored(self, incarnation: int, steps: int, fragments: Iterable[int]) -> None:
        """Note that the incarnation begins with an earlier one's moments after `steps`
        steps, and with its residuals of these fragments."""
        self._record("restored", 0, start=incarnation, value=steps)
        for fragment in fragments:
            self._record(
                "restored", 0, fragment=fragment, start=incarnation, value=steps
            )

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
