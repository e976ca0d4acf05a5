"""Every message between the lead and the holder of fragments.

The lead decides and keeps no array. A holder keeps fragments and the deltas that have
arrived for them, and decides nothing. It is in the lead's process, or in that of a
worker; all that passes between the two, apart from the bytes of deltas and publishes,
which islands exchange with the holder, is one of these messages.

A merge is ordered (`Merge`), computed, and prepared at its holder (`MergePrepared`).
The lead's record commits it, and `Commit` makes it visible. At a start the lead says
which versions its log has committed (`RestoreFragments`); what a holder has prepared
beyond them never was.

With a worker's process come messages for how it begins, shows that it lives, and ends.
Lead and worker have one connection, which the lead opens with `BeginWorker`. Neither
outlives it: the lead ends, and the worker begins anew from its disk.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from diloco_jax.protocol.messages import (
    Contribution,
    DeltaKey,
    Message,
    Prepared,
    Refusal,
    Version,
)


@functools.lru_cache(maxsize=8)
def deal(sizes: tuple[int, ...], workers: int) -> tuple[int, ...]:
    """Return the worker of each fragment: the largest fragment first, each to the
    worker with the fewest parameters; among equals, the first to the first. sizes:
    parameters by fragment."""
    held, dealt = Counter[int](), dict[int, int]()
    for fragment in sorted(range(len(sizes)), key=lambda f: -sizes[f]):
        worker = min(range(workers), key=lambda w: held[w])
        held[worker] += sizes[fragment]
        dealt[fragment] = worker
    return tuple(dealt[fragment] for fragment in range(len(sizes)))


# ---- at a start -------------------------------------------------------------


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a fragment that the lead's log has committed; NOTHING if its first
    anchor has yet to come. digests: those of
    the publishes whose records the log still has, by number of the version."""

    fragment: int
    version: Version
    digests: dict[int, str]


class RestoreFragments(Message, frozen=True, kw_only=True):
    """Bring the fragments to these versions, from snapshots and publishes. What was
    prepared beyond them never was. fences: nothing of these incarnations counts."""

    fragments: tuple[Committed, ...]
    fences: tuple[Forget, ...] = ()
    first: bool = False
    """The run begins: draw or read the first parameters, and make them durable."""


class RestoredFragment(Message, frozen=True, kw_only=True):
    """A fragment is at its committed version: it is merged and served from now on."""

    fragment: int
    version: Version
    snapshot: Version
    """Version of the snapshot from which its publishes led there."""
    momentum_untouched: bool = False
    """True if the outer optimizer is as it was in the snapshot, although merges came
    after it: it cannot be inferred from a published change."""
    digest: str
    """Digest of Theta."""


class LostFragment(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment that cannot be brought to its committed version: its files are gone or
    damaged. why: for people; empty if it has yet to come."""

    fragment: int
    why: str


class FragmentsRestored(Message, frozen=True, kw_only=True):
    """Answer to `RestoreFragments`. Each of the other fragments is told once it is
    back."""

    fragments: tuple[RestoredFragment, ...] = ()
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
        return [delta.key(self.fragment) for delta in self.contributions]


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
    term of the fragment. No other is awaited any more.

    With a sample, the island's ballot comes instead (`core/tiles.py`), and is
    compared with the anchor that is here."""

    fragment: int
    island: str
    incarnation: int
    term: int
    sample: int = 0
    """The number with which the ballot's sample is drawn; 0: the whole anchor comes."""


class AwaitTake(Message, frozen=True, kw_only=True):
    """The island is being asked for this delta. A worker takes in no other."""

    delta: DeltaKey


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
    used: int = 0
    """Tokens behind its counts of use."""
    uses: str = ""
    """Digest of its counts of use; empty if it has none."""


class MergePrepared(Message, frozen=True, kw_only=True):
    """The ordered merge is computed, and its encoded publish is on disk. Its record
    (`Persist`) and `Commit` make it visible; without them it does not count."""

    fragment: int
    version: Version
    prepared: Prepared


class AnchorKept(Message, frozen=True, kw_only=True):
    """The awaited anchor has arrived, and is on disk as the fragment's first snapshot
    in its new term. As for a merge, its record and `Commit` make it visible.

    unfit: it is not, since some of its values are not finite."""

    fragment: int
    island: str
    incarnation: int
    replaced: Version
    """Version of the anchor on the island."""
    version: Version
    """The same number in the new term."""
    digest: str
    """SHA-256 of the anchor, which a peer has sent."""
    parameters: str = ""
    """Digest of Theta, which is the anchor, as that of a merge."""
    unfit: bool = False


class AnchorCompared(Message, frozen=True, kw_only=True):
    """An island's ballot has arrived, and was compared with the anchor that is here."""

    fragment: int
    island: str
    incarnation: int
    version: Version
    """Version of the anchor on that island."""
    equal: bool
    """True if all digests are the same."""
    apart: float
    """Length of the difference, as far as the sample shows it."""


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
    experts: dict[str, float] = msgspec.field(default_factory=dict)
    """As `core.fragment_merge.Routing.measures`."""
    expert_loads: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    """As `Routing.loads`."""


class MergeDigested(Message, frozen=True, kw_only=True):
    """Digest of a fragment's Theta at a version; it is computed after the merge."""

    fragment: int
    version: Version
    digest: str
    anchor: str = ""
    """SHA-256 of the anchor, which islands have at that version; a worker's alone,
    since the anchors of islands take the places of what it loses."""


class HolderTroubled(Message, frozen=True, kw_only=True):
    """Something at a holder needs people's attention."""

    text: str


FromHolder = (
    DeltaArrived
    | MergePrepared
    | AnchorKept
    | AnchorCompared
    | CycleKept
    | MergesCompiled
    | MergeMeasured
    | MergeDigested
    | RestoredFragment
    | HolderTroubled
)


MAX_FRAME_BYTES = 64 << 20
"""Most bytes of one message; the largest are those of a start, with all fragments."""


class BeginWorker(Message, frozen=True, kw_only=True):
    """First message to a worker: hold these fragments, and serve islands."""

    config: dict[str, Any]
    """The run's, as builtins."""
    run_id: str
    worker: int
    fragments: tuple[int, ...]
    term: int
    """The run's. With `start`, it says which of two leads came later."""
    start: int
    """Number of this start of the lead, above those of earlier ones in the term."""


class SaveAll(Message, frozen=True, kw_only=True):
    """Write the last snapshots; see `FragmentSnapshots.write_last`."""

    within_s: float | None


class AllSaved(Message, frozen=True, kw_only=True):
    """Answer to `SaveAll`: versions and digests of Theta, by fragment; text: why
    snapshots are not written, empty if they are."""

    versions: dict[int, Version]
    digests: dict[int, str]
    text: str = ""


class LetGo(Message, frozen=True, kw_only=True):
    """The lead has what `KeepFragment` kept of the fragment, or wants it no more."""

    fragment: int


class RunOver(Message, frozen=True, kw_only=True):
    """The run is over, and the lead has all of the result. `WorkerEnds` answers."""


class LeadAlive(Message, frozen=True, kw_only=True):
    """Sign of life of the lead."""


class WorkerServes(Message, frozen=True, kw_only=True):
    """The worker answers islands. It follows `FragmentsRestored`."""


class WorkerAlive(Message, frozen=True, kw_only=True):
    """Sign of life of a worker. alerts: what people should know about its snapshots."""

    pid: int
    alerts: tuple[str, ...] = ()
    memory_bytes: int
    """The most memory that the process has had."""
    resident_bytes: int
    """The memory that the process has now."""


class WorkerFailed(Message, frozen=True, kw_only=True):
    """Last message of a worker that cannot go on."""

    text: str


class WorkerRefused(Message, frozen=True, kw_only=True):
    """The worker does not obey this lead; text: why, with the remedy."""

    code: str
    text: str


class WorkerEnds(Message, frozen=True, kw_only=True):
    """Last message of a worker that has heard that the run is over."""


ToWorker = (
    BeginWorker
    | RestoreFragments
    | ToHolder
    | AwaitTake
    | SaveAll
    | LetGo
    | RunOver
    | LeadAlive
)
FromWorker = (
    FragmentsRestored
    | FromHolder
    | WorkerServes
    | WorkerAlive
    | AllSaved
    | WorkerFailed
    | WorkerRefused
    | WorkerEnds
)

encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker).decode
from_worker = msgspec.msgpack.Decoder(FromWorker).decode


class Obeyed(NamedTuple):
    """The lead that a worker obeyed last."""

    run_id: str = ""
    term: int = 0
    start: int = 0

    def refusal(self, begin: BeginWorker, where: str) -> tuple[str, str] | None:
        """Return code and text of the refusal of a lead of another run, or of one that
        was started before the obeyed one. where: file that has this, for people."""
        if self.run_id and begin.run_id != self.run_id:
            return "run_id", (
                f"worker {begin.worker} holds fragments of run {self.run_id} "
                f"({where}), and the lead's run is {begin.run_id}; give another "
                f"--workdir, or remove that one"
            )
        if (begin.term, begin.start) < (self.term, self.start):
            return "lead", (
                f"worker {begin.worker} obeys start {self.start} of term {self.term} "
                f"of run {self.run_id}, and this is start {begin.start} of term "
                f"{begin.term}: another coordinator of this run was started later; end "
                f"one of them. If no other one is there, as after a wrong clock, "
                f"remove {where}"
            )
        return None


def next_start(last: int, unix_s: float) -> int:
    """Return the number of a start of the lead on a disk whose last one had the number
    `last`. Without that disk, the time of day counts."""
    return max(last + 1, int(unix_s))


class AwaitedTakes:
    """Takes that the lead awaits at a worker, and from which incarnations. Not
    thread-safe."""

    def __init__(self) -> None:
        self._takes: dict[tuple[str, int], tuple[int, int]] = {}
        """Incarnation and tick by island and fragment: the newest alone."""
        self._least: dict[str, int] = {}
        """The first incarnation of each island that counts."""

    def take(self, delta: DeltaKey) -> None:
        """Note that the island is asked for this delta."""
        self._takes[delta.island, delta.fragment] = delta.incarnation, delta.tick

    def drop(self, delta: DeltaKey) -> None:
        """Note that the delta is not needed any more."""
        if self.is_awaited(delta):
            del self._takes[delta.island, delta.fragment]

    def forget(self, island: str, before: int) -> None:
        """End the incarnations of an island below `before`."""
        self._least[island] = max(before, self.least(island) or 0)
        for key, (incarnation, _) in list(self._takes.items()):
            if key[0] == island and incarnation < before:
                del self._takes[key]

    def is_awaited(self, delta: DeltaKey) -> bool:
        """Tell whether the lead has said that it awaits this delta."""
        own = self._takes.get((delta.island, delta.fragment))
        return own == (delta.incarnation, delta.tick)

    def least(self, island: str) -> int | None:
        """Return the first incarnation of an island that has not ended; None if the
        lead has let none in."""
        return self._least.get(island)
