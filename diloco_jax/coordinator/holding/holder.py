"""Hold parameters and deltas in the lead's own process.

The lead and its holder exchange only messages (`protocol/holding.py`). Islands' bytes
come and go by `upload_begin`, `upload_end` and `fetch`; the caller checks first that
the island may.

Merges are computed on a few threads, one fragment on each. The same thread then writes
the publish to disk, which prepares the merge, and reports it with an event. A publish
that cannot be written is tried again for as long as islands last without a coordinator:
this merge stays open, and nothing else waits for it. Deltas are dropped once their
merge is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from diloco_jax import checkpoint, machine, run_files
from diloco_jax.config import Config
from diloco_jax.coordinator.disk_space import given_up
from diloco_jax.coordinator.holding.anchors import WRITE_AGAIN_S, LostFragments
from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    Saver,
    restore,
)
from diloco_jax.coordinator.holding.inbox import SPARED_BYTES_EACH, Inbox, Rooms
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.kept import KeptCycles, telling
from diloco_jax.core.fragment_merge import MergeResult, Squares, is_fit, length
from diloco_jax.core.fragments import digest_arrays
from diloco_jax.errors import remedy
from diloco_jax.faults import Faults
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.holding import (
    AwaitAnchor,
    Commit,
    DeltaArrived,
    Drop,
    Forget,
    FragmentsRestored,
    FromHolder,
    HolderTroubled,
    KeepFragment,
    Merge,
    MergeDigested,
    MergeMeasured,
    MergePrepared,
    MergesCompiled,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.protocol.messages import FromCoordinator, Hello
from diloco_jax.protocol.values import DeltaKey, Prepared
from diloco_jax.wire import bulk
from diloco_jax.wire.bulk import FetchSource
from diloco_jax.wire.errors import RemoteProtocolError

logger = logging.getLogger(__name__)


class PreparedMerge(NamedTuple):
    """A merge whose publish is on disk. seconds: time that computing took."""

    merge: Merge
    merged: MergeResult
    seconds: float

    def measured(self) -> MergeMeasured:
        """Return the numbers of the merge."""
        contributions = self.merge.contributions
        return MergeMeasured(
            fragment=self.merge.fragment,
            version=self.merge.version,
            islands=tuple(c.island for c in contributions),
            tokens=sum(c.tokens for c in contributions),
            share=self.merge.share,
            norm=self.merged.norm,
            seconds=self.seconds,
            measures=self.merged.measures._asdict(),
            directions=self.merged.directions,
        )


class PublishWriting:
    """Writes publishes, on any thread."""

    def __init__(
        self,
        publishes: Publishes,
        within_s: float,
        wait: Callable[[float], None],
        tell: Callable[[HolderTroubled], None],
    ) -> None:
        """within_s: seconds after which a publish that cannot be written has failed.
        wait: pauses for some seconds, and ends early at the end of the process."""
        self._publishes, self._within_s = publishes, within_s
        self._wait, self._tell = wait, tell

    def write(
        self, merge: Merge, merged: MergeResult, ended: Callable[[], bool]
    ) -> Prepared | None:
        """Write the publish of a merge, however often that takes; None once the process
        ends. Raises OSError, naming the fragment and the file, after `within_s`."""
        told, began = False, time.monotonic()
        while not ended():
            try:
                return self._publishes.write(
                    merge.fragment, merge.version, merged.payload, final=merge.final
                )
            except OSError as error:
                waited_s = time.monotonic() - began
                if waited_s >= self._within_s:
                    what = f"the publish of fragment {merge.fragment}"
                    raise given_up(what, waited_s, self._within_s, error) from error
                if not told:
                    self._tell_unwritten(merge, merged, error)
                told = True
                self._wait(WRITE_AGAIN_S)
        return None

    def _tell_unwritten(
        self, merge: Merge, merged: MergeResult, error: OSError
    ) -> None:
        text = (
            f"fragment {merge.fragment} is not merged yet: its publish of "
            f"{len(merged.payload):,} bytes cannot be written to {error.filename} "
            f"({error.strerror}); {remedy(error)} within "
            f"{self._within_s:g} s (4 * placement.outage_budget_s), and it goes "
            f"on; after that the coordinator ends"
        )
        self._tell(HolderTroubled(text=text))


CORES_PER_MERGE = 4
"""XLA spreads a block of a merge over cores, but Python between two blocks does not."""
MERGES_AT_ONCE = 4
"""Merges under way, at most: each holds three f32 arrays of its fragment."""
CHECKS_AT_ONCE = 2
"""Deltas that are checked at a time; others wait for their turn."""


class StoreHolder:
    """The `Holder` of the service's engine.

    write_within_s: seconds after which a publish that cannot be written has failed.
    """

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        publishes: Publishes,
        snapshots: FragmentSnapshots,
        kept: KeptCycles | None,
        *,
        write_within_s: float,
    ) -> None:
        self.store, self._inbox = store, inbox
        self._publishes, self._snapshots, self._kept = publishes, snapshots, kept
        self._saver = Saver(store, snapshots, publishes)
        self._writing = PublishWriting(
            publishes, write_within_s, self._wait, lambda told: self._tell(told)
        )
        self._merger = ThreadPoolExecutor(
            merges_at_once(machine.cores()), "diloco-merge"
        )
        self.faults, self._committed = Faults(), 0
        """Faults are fired with the number of each merge of this process."""
        self._prepared: dict[int, PreparedMerge] = {}
        """The prepared merge of each fragment, until it is committed."""
        self._closing = threading.Event()
        self._checks = threading.BoundedSemaphore(CHECKS_AT_ONCE)
        self.lost = LostFragments(
            store,
            self._saver,
            inbox,
            self._closing,
            self._submit,
            lambda report: self._tell(report),
        )

    def answer(
        self,
        tell: Callable[[FromHolder], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Set the callbacks, before any message is handed over.

        Args:
          tell: called with each message to the lead, on any thread.
          failed: called with the error of a merge, after which the process must end.
        """
        self._tell, self._failed = tell, failed

    def warm_up(self) -> None:
        """Compile what merges need, ahead of the first merge."""

        def compile_all() -> None:
            self.store.warm_up(self._closing.is_set, self.fragments)
            self._tell(MergesCompiled())

        self._submit(compile_all)

    @property
    def fragments(self) -> list[int]:
        """The fragments that are here."""
        return [f for f in self._snapshots.fragments if f not in self._saver.lost]

    def close(self) -> None:
        """Wait for the merge under way and the digests of committed ones; begin no
        other."""
        self._closing.set()
        self._merger.shutdown(wait=True)

    # ---- what the lead says ---------------------------------------------------------

    def hold(self, message: ToHolder) -> None:
        """See engine.Holder."""
        match message:
            case Merge():
                self._merge(message)
            case Commit(fragment=fragment) if fragment in self._saver.lost:
                self.lost.commit(fragment)
            case Commit():
                self._commit(message)
            case AwaitAnchor():
                self.lost.expect(message)
            case KeepFragment():
                theta = self.store.arrays(message.fragment)["theta"]
                assert self._kept is not None
                told = telling(lambda found: self._tell(found))
                self._kept.keep(message, lambda: theta, told)
            case Drop():
                self._inbox.drop(message.delta)
            case Forget():
                kept = frozenset(message.kept)
                self._inbox.drop_island(message.island, message.before, kept)

    # ---- what the process around it asks for ----------------------------------------

    def begin(self) -> None:
        """Make the fragments of a new run or term durable; see `Saver.begin`."""
        self._saver.begin()

    def restore(self, asked: RestoreFragments) -> FragmentsRestored:
        """Bring the fragments to what is committed; see `restore`."""
        found = restore(asked, self.store, self._snapshots, self._publishes)
        self.lost.lose(found.lost)
        return found

    def keep_house(self, now: float) -> None:
        """Begin to write the snapshot that is due, and to give back memory that is."""
        self._saver.write_due(now)
        if not self._closing.is_set():
            self._inbox.keep_house(now, self._submit)

    def save_all(self, within_s: float | None) -> bool:
        """Write the snapshots of the end; see `Saver.write_last`. Return True: they are
        on this machine."""
        self._saver.write_last(within_s)
        return True

    def wait(self, patience_s: Callable[[], float]) -> bool:
        """Wait for the snapshot under way; see `SnapshotWriter.wait`."""
        return self._snapshots.writer.wait(patience_s)

    def alerts(self, now: float) -> list[str]:
        """Return what people should know about its snapshots, and room for deltas."""
        return [*self._snapshots.writer.alerts(now), *self._inbox.alerts(now)]

    def completed(self, hello: Hello, message: FromCoordinator) -> FromCoordinator:
        """Return the message as it is; see `WorkersHolder.completed`."""
        return message

    def shown(self) -> dict[str, Any]:
        """Return nothing; see `WorkersHolder.shown`."""
        return {}

    def digest(self) -> str:
        """Return 16 hex digits over the Theta of all fragments."""
        return self.store.digest()

    # ---- islands' bytes, on many threads --------------------------------------------

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the place of a stripe of a delta or an anchor that is awaited; see
        `Inbox.begin`."""
        if start.version is not None:
            return self.lost.begin(start)
        self.lost.require_no_delta(start.fragment)
        return self._inbox.begin(start)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place; the last one makes the delta an event."""
        if start.version is not None:
            return self.lost.end(start, place)
        if not self._inbox.end(start, place):
            return False
        key = DeltaKey(start.island, start.incarnation, start.fragment, start.tick)
        try:
            with self._checks:
                payload = self._inbox.payload(key)
                squares = self.store.squares(start.fragment, payload)
                self._inbox.checked(key, squares)
        except BaseException:
            # The protocol does not know that the delta has arrived: its last part must
            # come again.
            self._inbox.reopen(start)
            raise
        if not is_fit(squares):
            logger.warning(
                "the delta of fragment %d, tick %d from %s, incarnation %d, has values "
                "or a norm that are not finite, but all must be: it is not merged; "
                "lower inner.learning_rate, or start that island again",
                start.fragment,
                start.tick,
                start.island,
                start.incarnation,
            )
        fit = is_fit(squares)
        self._tell(
            DeltaArrived(
                **key._asdict(),
                refusal="" if fit else "non_finite",
                norm=length(squares) if fit else 0.0,
            )
        )
        return True

    def fetch(self, request: bulk.FetchRequest) -> FetchSource:
        """Return published fragments for an island."""
        self.lost.require_here(request.fragment)
        try:
            return self.store.fetch(
                request.fragment, request.want, request.have, request.part
            )
        except ValueError as error:
            raise RemoteProtocolError(
                f"{request.island!r} asks for fragment {request.fragment}: {error}"
            ) from error

    # ---- inside ---------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def _merge(self, merge: Merge) -> None:
        payloads = [self._inbox.payload(key) for key in merge.deltas]
        squares = [self._inbox.squares(key) for key in merge.deltas]
        self._submit(lambda: self._prepare(merge, payloads, squares))

    def _commit(self, commit: Commit) -> None:
        self._committed += 1
        self.faults.fire(self._committed)
        prepared = self._prepared.pop(commit.fragment)
        merge, merged = prepared.merge, prepared.merged
        self.store.commit(commit.fragment, commit.version, merged)
        for key in merge.deltas:
            self._inbox.drop(key)
        self._tell(prepared.measured())
        self._submit(lambda: self._follow_up(merge, merged))

    def _prepare(
        self,
        merge: Merge,
        payloads: Sequence[npt.NDArray[np.uint8]],
        squares: Sequence[Squares],
    ) -> None:
        if self._closing.is_set():
            return
        self.store.put_aside(merge.fragment, self._publishes.mapped)
        started = time.monotonic()
        merged = self.store.merge(
            merge.fragment,
            merge.contributions,
            payloads,
            squares,
            share=merge.share,
            final=merge.final,
        )
        seconds = time.monotonic() - started
        prepared = self._writing.write(merge, merged, self._closing.is_set)
        if prepared is None:
            return
        change = merged.norm * (merged.measures.step_ratio or 1.0)
        prepared = replace(prepared, change=change)
        self.faults.fire(self._committed + 1, prepared=True)
        self._prepared[merge.fragment] = PreparedMerge(merge, merged, seconds)
        self._tell(
            MergePrepared(
                fragment=merge.fragment, version=merge.version, prepared=prepared
            )
        )

    def _follow_up(self, merge: Merge, merged: MergeResult) -> None:
        """Do the rest of a merge, once it is committed and nobody waits for it."""
        digested = MergeDigested(
            fragment=merge.fragment,
            version=merge.version,
            digest=digest_arrays(merged.state.theta),
            anchor=digest_arrays(merged.state.anchor),
        )
        self.store.expire_pins()
        give_memory_back()
        self._tell(digested)

    def _submit(self, job: Callable[[], None]) -> None:
        """Call a function on a merging thread; its error ends the process."""

        def attempt() -> None:
            try:
                job()
            except BaseException as error:
                self._failed(error)

        self._merger.submit(attempt)


def merges_at_once(cores: int) -> int:
    """Return the number of merges that a machine with this many cores computes at a
    time.
    """
    return min(MERGES_AT_ONCE, max(1, cores // CORES_PER_MERGE))


def make_holder(
    config: Config,
    store: Store,
    kept: KeptCycles | None,
    workdir: Path,
    whose: dict[str, Any],
    fragments: Sequence[int],
) -> StoreHolder:
    """Return the holder of these fragments, with their folders. kept: None for a
    worker, whose lead keeps cycles. whose: see `checkpoint`."""
    placement, plan = config.placement, store.plan
    rooms = Rooms(
        placement.merge_buffer_bytes // placement.workers,
        workdir,
        SPARED_BYTES_EACH * plan.total,
    )
    folder = checkpoint.snapshots_folder(placement, workdir)
    publishes = Publishes(workdir / run_files.PUBLISHES, fragments)
    snapshots = FragmentSnapshots(folder, placement, fragments, whose)
    return StoreHolder(
        store,
        Inbox(store.layouts_up, rooms),
        publishes,
        snapshots,
        kept,
        write_within_s=placement.alone_s,
    )
