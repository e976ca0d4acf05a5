"""Every message between the lead and the holder of fragments.

The lead decides and keeps no array. A holder keeps fragments and the deltas that have
arrived for them, and decides nothing. It is in the lead's process; all that passes
between the two, apart from the bytes of deltas and publishes, which islands exchange
with the holder, is one of these messages.

A merge is ordered (`Merge`), computed, and prepared at its holder (`MergePrepared`).
The lead's record commits it, and `Commit` makes it visible. At a start the lead says
which versions its log has committed (`RestoreFragments`); what a holder has prepared
beyond them never was.
"""

from __future__ import annotations

from typing import Any

import msgspec

from diloco_jax.protocol.messages import Message
from diloco_jax.protocol.reasons import Refusal
from diloco_jax.protocol.values import Contribution, DeltaKey, Prepared, Version

# ---- at a start -------------------------------------------------------------


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a fragment that the lead's log has committed. digests: those of
    the publishes whose records the log still has, by number of the version."""

    fragment: int
    version: Version
    digests: dict[int, str]


class RestoreFragments(Message, frozen=True, kw_only=True):
    """Bring the fragments to these versions, from snapshots and publishes, or as they
    are at a holder that has outlived the lead. What was prepared beyond them never was.
    fences: the deltas and tickets of these incarnations do not count."""

    fragments: tuple[Committed, ...]
    fences: tuple[Forget, ...] = ()


class RestoredFragment(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment is at its committed version."""

    fragment: int
    snapshot: Version
    """Version of the snapshot from which its publishes led there."""
    moved: bool
    """True if one of these publishes moves the outer optimizer."""
    digest: str
    """Digest of Theta."""


class LostFragment(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment that cannot be brought to its committed version: its files are gone or
    damaged. why: for people."""

    fragment: int
    why: str


class FragmentsRestored(Message, frozen=True, kw_only=True):
    """Answer to `RestoreFragments`."""

    fragments: tuple[RestoredFragment, ...]
    lost: tuple[LostFragment, ...] = ()
    discarded: int
    """Merges that were prepared and never committed."""
    environment: dict[str, Any]
    """Facts on which the bits of merges depend."""


# ---- to a holder --------------------------------------------------------------


class Merge(Message, frozen=True, kw_only=True):
    """Merge these deltas, in this order, into `version` of the fragment. `share`: the
    factor applied to the merged delta. `final`: merge as in the flush (weighted mean,
    learning rate 1, momentum untouched)."""

    fragment: int
    version: Version
    contributions: tuple[Contribution, ...]
    share: float
    final: bool

    @property
    def deltas(self) -> list[DeltaKey]:
        """Keys of the deltas, in the same order."""
        return [
            DeltaKey(c.island, c.incarnation, self.fragment, c.tick)
            for c in self.contributions
        ]


class Commit(Message, frozen=True, kw_only=True):
    """Make what was prepared, whose record is durable now, the fragment's version: a
    merge, whose deltas are not needed any more, or the anchor of a new term."""

    fragment: int
    version: Version


class KeepFragment(Message, frozen=True, kw_only=True):
    """Keep the fragment's parameters at its present version, which is the cycle's
    version.

    `merges` merges with `tokens` tokens led to it.
    """

    cycle: int
    fragment: int
    version: Version
    merges: int
    tokens: int


class Drop(Message, frozen=True, kw_only=True):
    """Drop the bytes of a delta, which are no longer needed."""

    delta: DeltaKey


class Forget(Message, frozen=True, kw_only=True):
    """Drop the deltas of the island's incarnations below `before`, except `kept`: a
    new incarnation joined."""

    island: str
    before: int
    kept: tuple[DeltaKey, ...]


class AwaitAnchor(Message, frozen=True, kw_only=True):
    """The fragment is lost here: its anchor comes from this island, and begins this
    term of the fragment. No other is awaited any more."""

    fragment: int
    island: str
    incarnation: int
    term: int


ToHolder = Merge | Commit | KeepFragment | Drop | Forget | AwaitAnchor


# ---- from a holder ------------------------------------------------------------


class DeltaArrived(Message, frozen=True, kw_only=True):
    """All bytes of a take have arrived; `refusal` says why they are unfit, if so."""

    island: str
    incarnation: int
    fragment: int
    tick: int
    refusal: Refusal = ""
    norm: float = 0.0
    """Length of the delta; 0: unknown."""


class MergePrepared(Message, frozen=True, kw_only=True):
    """The ordered merge is computed, and its encoded publish is on disk. Its record
    (`Persist`) and `Commit` make it visible; without them it does not count."""

    fragment: int
    version: Version
    prepared: Prepared


class AnchorKept(Message, frozen=True, kw_only=True):
    """The awaited anchor has arrived, and is on disk as the fragment's first snapshot
    in its new term. As for a merge, its record and `Commit` make it visible."""

    fragment: int
    island: str
    incarnation: int
    replaced: Version
    """Version of the anchor on the island."""
    version: Version
    """The same number in the new term."""
    digest: str
    """Digest of Theta, which is the anchor."""


class CycleKept(Message, frozen=True, kw_only=True):
    """All fragments of a kept cycle are on disk, or it was given up."""

    cycle: int


class MergesCompiled(Message, frozen=True, kw_only=True):
    """Everything that merges need is compiled: merges ordered before this waited."""


class MergeMeasured(Message, frozen=True, kw_only=True):
    """Numbers of a merge that was committed; no decision depends on them."""

    fragment: int
    version: Version
    islands: tuple[str, ...]
    tokens: int
    share: float
    norm: float
    """Length of the merged delta."""
    seconds: float
    """Time that computing took."""
    measures: dict[str, float | None]
    """Fields of `core.fragment_merge.MergeMeasures`, by name."""
    directions: tuple[float | None, ...] = ()
    """Cosine of each island's delta with the others, in their order; empty if there are
    too few."""


class MergeDigested(Message, frozen=True, kw_only=True):
    """Digest of a fragment's Theta at a version; it is computed after the merge."""

    fragment: int
    version: Version
    digest: str


class HolderTroubled(Message, frozen=True, kw_only=True):
    """Something at a holder needs people's attention."""

    text: str


FromHolder = (
    DeltaArrived
    | MergePrepared
    | AnchorKept
    | CycleKept
    | MergesCompiled
    | MergeMeasured
    | MergeDigested
    | HolderTroubled
)
