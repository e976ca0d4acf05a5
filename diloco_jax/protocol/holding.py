"""Every message between the lead and the holder of fragments.

The lead decides and keeps no array. A holder keeps fragments and the deltas that have
arrived for them, and decides nothing. It is in the lead's process, or in that of a
worker; all that passes between the two, apart from the bytes of deltas and publishes,
which islands exchange with the holder, is one of these messages.

A merge is ordered (`Merge`), computed, and prepared at its holder (`MergePrepared`).
The lead's record commits it, and `Commit` makes it visible. At a start the lead says
which versions its log has committed (`RestoreFragments`); what a holder has prepared
beyond them never was.

With a worker's process come messages for how it begins, shows that it lives, and ends;
with an outpost, the process on another machine that starts a worker there, those about
files. Each connection to it begins with the outpost's word. The lead then says
`BeginWorker`, and speaks with the worker from there on; or it asks about files, one
after another; or it says that the run is over.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.messages import Message
from diloco_jax.protocol.values import (
    Contribution,
    DeltaKey,
    Prepared,
    Refusal,
    Version,
)

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


MAX_FRAME_BYTES = 64 << 20
"""Most bytes of one message; the largest are those of a start, with all fragments."""


class BeginWorker(Message, frozen=True, kw_only=True):
    """First message to a worker: hold these fragments, serve islands at `bind`."""

    config: dict[str, Any]
    """The run's, as builtins."""
    workdir: str
    run_id: str
    worker: int
    fragments: tuple[int, ...]
    bind: str
    ticket_key: bytes
    """Key of the tickets of this life of the lead; see `tickets`."""
    lead: int = 1
    """Counts the lives of the lead in the run: a worker believes the newest alone."""
    life: int = 1
    """Counts the processes of this worker in the run."""
    dial: int = 0
    """Counts the lines of this life of the lead to a worker on another machine."""
    clock: float = 0.0
    """The lead's clock as it says this, by which its tickets end. It does not jump, and
    passes while the machine sleeps (`coordinator/watchdog.py`)."""

    def is_newer(self, lead: int, dial: int) -> bool:
        """Tell whether it comes after a line of that lead, with that number."""
        return (self.lead, self.dial) > (lead, dial)

    def is_like(self, other: BeginWorker) -> bool:
        """Tell whether a worker that was begun so can go on with `other`."""
        return _for_a_worker(self) == _for_a_worker(other)


def _for_a_worker(begin: BeginWorker) -> BeginWorker:
    """Return what must not change under a worker. A lead that is started again may
    serve at another port, and the worker goes on where it serves."""
    placement = begin.config.get("placement", {})
    own = {k: v for k, v in placement.items() if k not in ("bind", "advertise")}
    config = {**begin.config, "placement": own}
    return replace(
        begin,
        config=config,
        ticket_key=b"",
        lead=0,
        life=0,
        dial=0,
        bind="",
        clock=0.0,
    )


class SaveAll(Message, frozen=True, kw_only=True):
    """Write the last snapshots; see `Saver.write_last`."""

    within_s: float | None


class AllSaved(Message, frozen=True, kw_only=True):
    """Answer to `SaveAll`: digests of Theta, by fragment; text: why snapshots are not
    written, empty if they are."""

    digests: dict[int, str]
    text: str = ""


class FragmentKept(Message, frozen=True, kw_only=True):
    """A fragment of a kept cycle is on disk; `trouble` says why not, if it is not."""

    keep: KeepFragment
    trouble: str = ""


class EndWorker(Message, frozen=True, kw_only=True):
    """End: the coordinator is about to end."""


class LeadAlive(Message, frozen=True, kw_only=True):
    """Sign of life of the lead."""


class WorkerServes(Message, frozen=True, kw_only=True):
    """The worker answers islands at this HOST:PORT. It follows `FragmentsRestored`."""

    address: str


class WorkerAlive(Message, frozen=True, kw_only=True):
    """Sign of life of a worker. alerts: what people should know about its snapshots."""

    alerts: tuple[str, ...]
    memory_bytes: int
    """The most memory that the process has had."""
    resident_bytes: int
    """The memory that the process has now."""
    process: str
    """Drawn by each process: another one means that the one before has ended."""


class WorkerFailed(Message, frozen=True, kw_only=True):
    """Last message of a worker that cannot go on."""

    text: str
    errno: int = 0
    """Number of the system's error, if it is one."""


class WorkerRefused(Message, frozen=True, kw_only=True):
    """A worker on another machine does not do that; text: why, with the remedy."""

    text: str
    passing: bool = False
    """Another attempt may succeed."""


ToWorker = BeginWorker | RestoreFragments | ToHolder | SaveAll | EndWorker | LeadAlive
FromWorker = (
    FragmentsRestored
    | FromHolder
    | WorkerServes
    | WorkerAlive
    | AllSaved
    | FragmentKept
    | WorkerFailed
    | WorkerRefused
)

OF_ONE_LEAD = MergePrepared | AnchorKept | DeltaArrived
"""Messages for the lead under which they were made, and for no later one: merges that
a later one has not committed never were, and it is told of deltas anew."""

encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker).decode
from_worker = msgspec.msgpack.Decoder(FromWorker).decode


Kind = Literal["snapshot", "publish"]
LEADS_OF_TERM = 1 << 32
"""Numbers of leads that one term has: more than unix time has seconds."""


class OutpostReady(Message, frozen=True, kw_only=True):
    """First word of an outpost: it obeys this caller."""

    worker: int


class AboutFiles(Message, frozen=True, kw_only=True):
    """First message of a connection for files: which lead asks."""

    run_id: str
    worker: int
    lead: int


class AskNewest(Message, frozen=True, kw_only=True):
    """Which is the newest snapshot of a fragment there? `Newest` answers."""

    fragment: int


class Newest(Message, frozen=True, kw_only=True):
    """Version of that snapshot; None: there is none. seal: see `sealed.seal_of`."""

    version: Version | None
    seal: str = ""


class PutFile(Message, frozen=True, kw_only=True):
    """Keep a file of a fragment, whose bytes follow. `Stored` answers."""

    kind: Kind
    fragment: int
    version: Version
    size: int


class Stored(Message, frozen=True, kw_only=True):
    """The file is on disk."""


class GetSnapshot(Message, frozen=True, kw_only=True):
    """Send the newest snapshot of a fragment. `FileComes` answers."""

    fragment: int


class GetKept(Message, frozen=True, kw_only=True):
    """Send a fragment of a kept cycle. `FileComes` answers."""

    cycle: int
    fragment: int


class DropKept(Message, frozen=True, kw_only=True):
    """Delete it: the lead has it on disk. `Stored` answers."""

    cycle: int
    fragment: int


class RunOver(Message, frozen=True, kw_only=True):
    """The run is over: nobody will begin the worker again. `OutpostEnds` answers."""


class AtWork(Message, frozen=True, kw_only=True):
    """Sign of life from either end, while it forces a file to disk or checks one; what
    the other end waits for follows."""


class OutpostEnds(Message, frozen=True, kw_only=True):
    """The outpost ends, and the worker with it."""


class FileComes(Message, frozen=True, kw_only=True):
    """The bytes of the file follow. version: a snapshot's."""

    size: int
    version: Version = Version()


FilesAsked = AskNewest | PutFile | GetSnapshot | GetKept | DropKept | RunOver | AtWork
FirstWord = BeginWorker | AboutFiles
FromOutpost = (
    OutpostReady | WorkerRefused | Newest | Stored | FileComes | OutpostEnds | AtWork
)


def first_number(term: int, unix_s: float) -> int:
    """Return the least number of a lead of workers on other machines. One that has lost
    its disk comes after those before it, whatever its clock shows: it opens a term."""
    return term * LEADS_OF_TERM + int(unix_s)


def next_number(last: int, at_least: int) -> int:
    """Return the number of a lead on a disk whose last one had the number `last`."""
    return max(at_least, last + 1)


class Obeyed(NamedTuple):
    """The line of a lead that a worker on another machine obeyed last."""

    run_id: str = ""
    lead: int = 0
    dial: int = 0

    def after(self, word: FirstWord) -> Obeyed | None:
        """Return what is obeyed after a lead of this run has said that; None if it is
        an older one, which is refused."""
        if isinstance(word, BeginWorker):
            newer, dial = word.is_newer(self.lead, self.dial), word.dial
        else:
            newer = word.lead >= self.lead
            dial = self.dial if word.lead == self.lead else 0
        return Obeyed(word.run_id, word.lead, dial) if newer else None


first_word = msgspec.msgpack.Decoder(FirstWord).decode
files_asked = msgspec.msgpack.Decoder(FilesAsked).decode
from_outpost = msgspec.msgpack.Decoder(FromOutpost).decode
