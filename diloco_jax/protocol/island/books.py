"""The books of one incarnation: which of its steps are in which take.

Per fragment: the anchor's version, the first step that is in no take yet, and the
outstanding take. Steps count from 0; a take at step s covers the half-open interval
[start, s). Every change is a `Record`, which the coordinator puts on the tape and from
which it keeps its ledger. No arrays here: the shell does to them what the outcomes say.

A fragment is *unsettled* from its take until the adoption of a version that may have
it: its local value is anchor - delta + later steps, so a second take would count the
first one's steps again. A version that certainly has not the delta, since the
coordinator called it pending there, is adopted beside it under a rule that keeps it
(docs/design/pending_deltas.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from diloco_jax.protocol.island.adopt_traits import AdoptTraits
from diloco_jax.protocol.reasons import NON_FINITE, OVERLAP, STALE
from diloco_jax.protocol.values import (
    FIRST_VERSION,
    Outstanding,
    Record,
    RecordKind,
    Span,
    Verdict,
    Version,
)

Outcome = Literal["none", "settled", "reopened", "dropped", "reset"]
"""The consequence of a verdict for the arrays of the fragment.

none: nothing. settled: the delta is merged, the residual after it stands. reopened: as
if the take had not been. dropped: the steps are lost, the residual before it returns; a
kept delta leaves the local value with the next version.
reset: as dropped, and the local value, which is unusable or has steps in it that the
anchor has too, goes back to the anchor."""

AdoptOutcome = Literal["none", "adopted", "kept"]
"""none: the version is not newer. kept: adopted, beside the delta of the last take."""


@dataclasses.dataclass
class _Account:
    version: Version
    start: int
    tick: int = -1
    take: Outstanding | None = None
    unsettled: bool = False
    late: int = -1
    """Tick of a take, made or to be made, that is in no version up to `pending_at`."""
    pending_at: Version = FIRST_VERSION
    kept: bool = False
    """The last take is in the local value beside a version that has it not."""


class Books:
    """Intervals, outstanding takes and records of one incarnation.

    versions: those of the anchors that the incarnation begins with, by fragment.
    """

    def __init__(self, versions: Sequence[Version], traits: AdoptTraits) -> None:
        self._accounts = [_Account(version, start=0) for version in versions]
        self.traits = traits
        self._next_seq = 1
        self._new: list[Record] = []

    def begin(self) -> None:
        """Notes what the incarnation begins with: every fragment, adopted at step 0."""
        for fragment, account in enumerate(self._accounts):
            self._record("adopted", 0, fragment=fragment, version=account.version)

    def version(self, fragment: int) -> Version:
        """Version of the fragment's anchor."""
        return self._accounts[fragment].version

    def versions(self) -> list[Version]:
        """Versions of all anchors, by fragment."""
        return [account.version for account in self._accounts]

    def outstanding(self) -> tuple[Outstanding, ...]:
        """Takes without a final verdict."""
        return tuple(a.take for a in self._accounts if a.take is not None)

    def must_wait(self, fragment: int) -> bool:
        """True if a take must wait for an adoption: the last one is merged, or was too
        old."""
        account = self._accounts[fragment]
        return account.take is None and account.unsettled

    def take(self, fragment: int, tick: int, step: int) -> Outstanding | None:
        """Opens a take of [start, step); None if this request is to be ignored.

        Ignored are a repeated tick and a fragment with an outstanding take.
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
        )
        account.take, account.tick = take, tick
        account.start, account.unsettled, account.kept = step, True, False
        self._record(
            "took",
            step,
            fragment=fragment,
            tick=tick,
            start=take.start,
            version=take.base,
        )
        return take

    def adopt(self, fragment: int, version: Version, step: int) -> AdoptOutcome:
        """Notes an adoption, and says which."""
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
            account.start = step
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
        """Notes the verdict on a take, told at that version of the fragment; "none"
        unless it ends the outstanding one."""
        account = self._accounts[fragment]
        take = account.take
        if verdict == "pending":
            account.late, account.pending_at = tick, version
        if take is None or take.tick != tick or verdict in ("pending", "none"):
            return "none"
        account.take = None
        if verdict == "merged":
            return "settled"
        if reason == NON_FINITE or (reason == OVERLAP and account.unsettled):
            account.start, account.unsettled = step, False
            self._record("reset", step, fragment=fragment, tick=tick)
            return "reset"
        # While a newer version is on its way, the next one would be stale again.
        behind = reason == STALE and account.version < version
        if account.unsettled and not (account.kept and behind):
            account.start, account.unsettled = take.start, behind
            account.late = -1
            self._record("reopened", step, fragment=fragment, tick=tick)
            return "reopened"
        self._record("dropped", step, fragment=fragment, tick=tick)
        return "dropped"

    def new_term(self, step: int) -> list[Outstanding]:
        """Drops all outstanding takes and returns them: a coordinator that lost its
        state cannot know whether they are in the anchors with which it began anew.
        Notes from which step on this incarnation's steps are for its new books."""
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
        """Notes positions of data that came in."""
        self._record("granted", step, start=span.start, stop=span.stop)

    def progress(self, others_tokens: int, step: int) -> None:
        """Notes the others' tokens on which the learning rate is based from here."""
        self._record("progress", step, value=others_tokens)

    def restored(self, incarnation: int, steps: int, fragments: Iterable[int]) -> None:
        """Notes that the incarnation begins with the moments that an earlier one had
        after so many steps, and with its residuals of these fragments."""
        self._record("restored", 0, start=incarnation, value=steps)
        for fragment in fragments:
            self._record(
                "restored", 0, fragment=fragment, start=incarnation, value=steps
            )

    def drain(self) -> tuple[Record, ...]:
        """Records since the last call, oldest first."""
        new, self._new = tuple(self._new), []
        return new

    def _record(self, kind: RecordKind, step: int, **fields: Any) -> None:
        self._new.append(Record(seq=self._next_seq, kind=kind, step=step, **fields))
        self._next_seq += 1
