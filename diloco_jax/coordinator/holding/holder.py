"""Hold parameters and deltas for the lead: in its own process, or at workers.

The lead and its holder exchange only messages (`protocol/holding.py`). Islands' bytes
come and go by `upload_begin`, `upload_end` and `fetch`; the caller checks first that
the island may.

At a start fragments come back from the disk on a few threads, each by itself. One that
is not back yet is busy: its merges wait, and so does who fetches it. Nothing else does.

Merges are computed on a few threads, one fragment on each. The same thread then writes
the publish to disk, which prepares the merge, and reports it with an event. A publish
that cannot be written is tried again for as long as islands last without a coordinator:
this merge stays open, and nothing else waits for it. Deltas are dropped once their
merge is committed.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from diloco_jax import checkpoint, files, machine, run_files
from diloco_jax.config import Config
from diloco_jax.coordinator.holding.anchors import LostFragments
from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    KeptCycles,
    Publishes,
    load_first,
    repeat,
    require,
    restored,
)
from diloco_jax.coordinator.holding.inbox import SPARED_BYTES_EACH, Inbox, Rooms
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.journal import DurableError
from diloco_jax.coordinator.watchdog import given_up
from diloco_jax.core.fragment_merge import MergeResult, Squares, is_fit, length
from diloco_jax.core.fragments import Params
from diloco_jax.core.tiles import digest_all, sha256_arrays
from diloco_jax.errors import remedy
from diloco_jax.faults import Faults
from diloco_jax.machine import give_memory_back
from diloco_jax.models.build import build
from diloco_jax.protocol.holding import (
    AwaitAnchor,
    Commit,
    Committed,
    DeltaArrived,
    Drop,
    Forget,
    FragmentsRestored,
    FromHolder,
    KeepFragment,
    LostFragment,
    Merge,
    MergeDigested,
    MergeMeasured,
    MergePrepared,
    MergesCompiled,
    RestoredFragment,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.protocol.messages import (
    NOTHING,
    DeltaKey,
    FromCoordinator,
    Hello,
    Prepared,
)
from diloco_jax.weights.first import first_pieces
from diloco_jax.wire import bulk
from diloco_jax.wire.bulk import FetchSource
from diloco_jax.wire.errors import RemoteProtocolError

logger = logging.getLogger(__name__)

Tell = Callable[[FromHolder], None]
T = TypeVar("T")


class FragmentHolder(ABC):
    """All fragments of a run, as its lead has them. What a kind of holder has no part
    in does nothing."""

    def __init__(self) -> None:
        self._tell: Tell = lambda message: None
        self._failed: Callable[[BaseException], None] = lambda error: None

    def answer(self, tell: Tell, failed: Callable[[BaseException], None]) -> None:
        """Set the callbacks, before any message is handed over.

        Args:
          tell: called with each message to the lead, on any thread.
          failed: called with the error of a merge, after which the process must end.
        """
        self._tell, self._failed = tell, failed

    @abstractmethod
    def hold(self, message: ToHolder) -> None:
        """See `lead.Holder`."""

    @abstractmethod
    def restore(self, asked: RestoreFragments) -> FragmentsRestored:
        """Begin to bring the fragments to what is committed, or make those of a new
        run; see `RestoreFragments`. The answer says which are lost, as far as the names
        and headers of their files tell."""

    @abstractmethod
    def save_all(self, within_s: float | None) -> bool:
        """Write the snapshots of the end; see `FragmentSnapshots.write_last`. Return
        whether all are on this machine."""

    @abstractmethod
    def alerts(self, now: float) -> list[str]:
        """Return what people should know about snapshots, and room for deltas."""

    @abstractmethod
    def digest(self) -> str:
        """Return 16 hex digits over the Theta of all fragments; empty while some are
        being restored."""

    @abstractmethod
    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the place of a stripe of a delta or an anchor that is awaited. Raises
        Busy if that is at a worker; so do the next two."""

    @abstractmethod
    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place; the last one makes the delta an event."""

    @abstractmethod
    def fetch(self, request: bulk.FetchRequest) -> FetchSource:
        """Return published fragments for an island."""

    def completed(self, hello: Hello, message: FromCoordinator) -> FromCoordinator:
        """Complete a message for the island that said hello, before it is sent."""
        return message

    def shown(self) -> dict[str, Any]:
        """Return what `diloco status` shows beside the run's state."""
        return {}

    def warm_up(self) -> None:  # noqa: B027
        """Compile what merges need, ahead of the first merge. From now on the holder
        tells which fragments are back."""

    def keep_house(self, now: float) -> None:  # noqa: B027
        """Begin to write the snapshot that is due."""

    def wait(self, patience_s: Callable[[], float]) -> bool:
        """Wait for the snapshot under way; see `SnapshotWriter.wait`."""
        return True

    def close(self) -> None:  # noqa: B027
        """Wait for the merge under way and the digests of committed ones; begin no
        other."""


CORES_PER_MERGE = 4
"""XLA spreads a block of a merge over cores, but Python between two blocks does not."""
MERGES_AT_ONCE = 4
"""Merges under way, at most: each holds three f32 arrays of its fragment."""
CHECKS_AT_ONCE = 2
"""Deltas that are checked at a time; others wait for their turn."""
RESTORES_AT_ONCE = 4
"""Fragments that are restored at a time: one is read while another is decoded. If all
shared a disk, the first would be back with the last."""


class StoreHolder(FragmentHolder):
    """Fragments that are in this process: all of them, or those of a worker."""

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        publishes: Publishes,
        snapshots: FragmentSnapshots,
        kept: KeptCycles | None,
        *,
        write_within_s: float,
        first: Callable[[], Params] = dict,
        in_regions: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """kept: None for a worker, whose lead keeps cycles. write_within_s: seconds
        after which a publish that cannot be written has failed. first: draws or reads
        the first parameters of a new run. in_regions: hosts of the islands that are in
        a region with others."""
        super().__init__()
        self._first, self._in_regions = first, in_regions
        self.store, self._inbox, self._kept = store, inbox, kept
        self._publishes, self._snapshots = publishes, snapshots
        self._write_within_s = write_within_s
        self._merger = ThreadPoolExecutor(
            merges_at_once(machine.cores()), "diloco-merge"
        )
        self.faults, self._committed = Faults(), 0
        """Faults are fired with the number of each merge of this process."""
        self._prepared: dict[int, tuple[Merge, MergeResult, float]] = {}
        """The prepared merge of each fragment, until it is committed, and the seconds
        that computing it took."""
        self._closing, self._begun = threading.Event(), threading.Event()
        self._restoring: RestoreFragments | None = None
        self._back: dict[int, Future[str]] = {}
        """The digest of each fragment that was asked for, once it is back and the lead
        knows it."""
        self._restorer = ThreadPoolExecutor(RESTORES_AT_ONCE, "diloco-restore")
        self._checks = threading.BoundedSemaphore(CHECKS_AT_ONCE)
        self.lost = LostFragments(
            store,
            snapshots,
            publishes,
            inbox.rooms,
            self._closing,
            self._submit,
            lambda report: self._tell(report),
        )

    def warm_up(self) -> None:
        """See `FragmentHolder`."""
        lost, lock = self._snapshots.lost, threading.Lock()
        own = [f for f in self._snapshots.fragments if f not in lost]
        left = set(own)

        def compile_one(fragment: int) -> None:
            self.store.warm_up(fragment, self._closing.is_set)
            with lock:
                left.discard(fragment)
                if left:
                    return
            self._tell(MergesCompiled())

        for fragment in own:
            job = functools.partial(compile_one, fragment)
            self._when_back(fragment, functools.partial(self._submit, job))
        if not own:
            self._submit(lambda: self._tell(MergesCompiled()))
        self._begun.set()

    @property
    def fragments(self) -> list[int]:
        """The fragments that are here."""
        missing = self._snapshots.lost | self._snapshots.away
        return [f for f in self._snapshots.fragments if f not in missing]

    def close(self) -> None:
        """See `FragmentHolder`."""
        self._closing.set()
        self._begun.set()
        self._restorer.shutdown(wait=True, cancel_futures=True)
        self._merger.shutdown(wait=True)

    # ---- what the lead says ---------------------------------------------------------

    def hold(self, message: ToHolder) -> None:
        """See `lead.Holder`."""
        match message:
            case Merge():
                self._merge(message)
            case Commit(fragment=fragment) if fragment in self._snapshots.lost:
                self.lost.commit(fragment)
            case Commit():
                self._commit(message)
            case AwaitAnchor():
                self.lost.expect(message)
            case KeepFragment():
                self._when_back(message.fragment, lambda: self._keep(message))
            case Drop():
                self._inbox.drop(message.delta)
            case Forget():
                kept = frozenset(message.kept)
                self._inbox.drop_island(message.island, message.before, kept)

    # ---- what the process around it asks for ----------------------------------------

    def restore(
        self, asked: RestoreFragments, *, whole: bool = False
    ) -> FragmentsRestored:
        """See `FragmentHolder`. whole: wait for all of them, and name every lost one:
        those of a worker are gathered from islands before anyone is let in."""
        if asked.first:
            return self._begin()
        committed = {c.fragment: c.version for c in asked.fragments}
        discarded = self._publishes.discard(committed)
        lost: list[LostFragment] = []

        def found(own: Committed, job: Callable[[], T]) -> T | None:
            try:
                return job()
            except (files.SealedError, DurableError) as error:
                lost.append(LostFragment(fragment=own.fragment, why=str(error)))
            return None

        here, back = [], []
        for own in asked.fragments:
            look = functools.partial(require, own, self._snapshots, self._publishes)
            if own.version == NOTHING:
                lost.append(LostFragment(fragment=own.fragment, why=""))
            elif found(own, look) is not None:
                here.append(own)
        self._restoring = asked
        self._snapshots.away.update(own.fragment for own in here)
        if whole:
            jobs = [self._restorer.submit(self._bring_back, own) for own in here]
            pairs = zip(here, jobs, strict=True)
            back = [one for own, job in pairs if (one := found(own, job.result))]
            self._snapshots.away.difference_update(one.fragment for one in back)
        else:
            self._back, began = (
                {own.fragment: Future() for own in here},
                time.monotonic(),
            )
            for own in here:
                later = functools.partial(self._go_on_with, own, began)
                self._restorer.submit(self._attempt, later)
        self.lost.lose(lost)
        self._snapshots.away.difference_update(self._snapshots.lost)
        return FragmentsRestored(
            fragments=tuple(back),
            lost=tuple(lost),
            discarded=discarded,
            environment=self.store.describe(),
        )

    def keep_house(self, now: float) -> None:
        """See `FragmentHolder`."""
        self._snapshots.write_due(now, self.store, self._publishes)

    def save_all(self, within_s: float | None) -> bool:
        """See `FragmentHolder`. The result of a run has all fragments, those too that
        nobody has waited for."""
        if within_s is None and self._restoring is not None:
            for own in self._restoring.fragments:
                if own.fragment in self._snapshots.away:
                    self._bring_back_and_tell(own, lambda: False)
        self._snapshots.write_last(within_s, self.store, self._publishes)
        return True

    def wait(self, patience_s: Callable[[], float]) -> bool:
        """See `FragmentHolder`."""
        return self._snapshots.writer.wait(patience_s)

    def alerts(self, now: float) -> list[str]:
        """See `FragmentHolder`."""
        return [*self._snapshots.writer.alerts(now), *self._inbox.rooms.alerts(now)]

    def digest(self) -> str:
        """See `FragmentHolder`."""
        return "" if self._snapshots.away else self.store.digest()

    def shown(self) -> dict[str, Any]:
        """See `FragmentHolder`. restoring: fragments that are not back yet."""
        away = sorted(self._snapshots.away)
        return {"restoring": away} if away else {}

    # ---- islands' bytes, on many threads --------------------------------------------

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """See `FragmentHolder`, and `Inbox.begin`."""
        if start.version is not None:
            return self.lost.begin(start)
        self._snapshots.require_no_delta(start.fragment)
        return self._inbox.begin(start)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """See `FragmentHolder`."""
        if start.version is not None:
            return self.lost.end(start, place)
        if not self._inbox.end(start, place):
            return False
        key = DeltaKey(start.island, start.incarnation, start.fragment, start.tick)
        try:
            with self._checks:
                try:
                    payload = self._inbox.payload(key)
                except KeyError:
                    return False  # Nobody waits for it any more.
                squares = self.store.squares(start.fragment, payload)
                uses = self.store.uses(start.fragment, payload)
                self._inbox.checked(key, squares)
        except BaseException:
            # The protocol does not know that the delta has arrived: its last part must
            # come again.
            self._inbox.reopen(start)
            raise
        if not (fit := is_fit(squares)):
            logger.warning(
                "the delta of fragment %d, tick %d from %s, incarnation %d, has values "
                "or a norm that are not finite, but all must be: it is not merged; "
                "lower inner.learning_rate, or start that island again",
                start.fragment,
                start.tick,
                start.island,
                start.incarnation,
            )
        self._tell(
            DeltaArrived(
                **key._asdict(),
                refusal="" if fit else "non_finite",
                norm=length(squares) if fit else 0.0,
                used=uses.most,
                uses=uses.digest,
            )
        )
        return True

    def fetch(self, request: bulk.FetchRequest) -> FetchSource:
        """See `FragmentHolder`."""
        self._snapshots.require_here(request.fragment)
        try:
            source = self.store.fetch(
                request.fragment, request.want, request.have, request.part
            )
            if hosts := self._in_regions.get(request.island):
                fragment, part = request.fragment, request.part
                self.store.note_part(fragment, request.island, part, hosts)
            return source
        except ValueError as error:
            raise RemoteProtocolError(
                f"{request.island!r} asks for fragment {request.fragment}: {error}"
            ) from error

    # ---- inside ---------------------------------------------------------------------

    def _begin(self) -> FragmentsRestored:
        """Make the fragments of a new run; they are durable when this returns."""
        own = self._snapshots.fragments
        load_first(self.store, self._first(), own)
        give_memory_back()
        begun = []
        for fragment in own:
            version, arrays = self.store.current(fragment)
            self._snapshots.begin(fragment, version, arrays, self._publishes)
            digest = self.store.digest_of(fragment)
            begun.append(
                RestoredFragment(
                    fragment=fragment, version=version, snapshot=version, digest=digest
                )
            )
        return FragmentsRestored(
            fragments=tuple(begun), discarded=0, environment=self.store.describe()
        )

    def _bring_back(
        self, committed: Committed, ended: Callable[[], bool] | None = None
    ) -> RestoredFragment | None:
        """Restore a fragment; None: `ended`, or closing."""
        parts = self.store, self._snapshots, self._publishes
        found = restored(committed, *parts, ended or self._closing.is_set)
        self.store.trim()
        give_memory_back()
        return found

    def _bring_back_and_tell(
        self, committed: Committed, ended: Callable[[], bool] | None = None
    ) -> RestoredFragment | None:
        """Restore a fragment, and tell of it before a snapshot of it can be written:
        its momentum may be another one than before. None: `ended`, or closing. Raises
        DurableError if it is lost: a run without workers cannot go on then."""
        try:
            found = self._bring_back(committed, ended)
        except (files.SealedError, DurableError) as error:
            raise lost_here(str(error)) from error
        finally:
            self._begun.wait()
        if found is not None:
            self._tell(found)
            self._snapshots.away.discard(committed.fragment)
        return found

    def _go_on_with(self, committed: Committed, began: float) -> None:
        """Restore a fragment beside the run, and do what has waited for it."""
        if (found := self._bring_back_and_tell(committed)) is None:
            return
        self._back[committed.fragment].set_result(found.digest)
        if all(back.done() for back in self._back.values()):
            logger.info(
                "all %d fragments are back, after %.1f s: global parameters %s",
                len(self._back),
                time.monotonic() - began,
                digest_all(back.result() for back in self._back.values()),
            )

    def _when_back(self, fragment: int, job: Callable[[], None]) -> None:
        """Call a function at once, or once the fragment has been restored."""
        back = self._back.get(fragment)
        if back is None:
            job()
        else:
            back.add_done_callback(lambda _: self._attempt(job))

    def _keep(self, keep: KeepFragment) -> None:
        assert self._kept is not None
        theta = self.store.arrays(keep.fragment)["theta"]
        self._kept.keep(keep, lambda: theta, lambda found: self._tell(found))

    def _merge(self, merge: Merge) -> None:
        payloads = [self._inbox.payload(key) for key in merge.deltas]
        squares = [self._inbox.squares(key) for key in merge.deltas]
        job = functools.partial(self._prepare, merge, payloads, squares)
        self._when_back(merge.fragment, functools.partial(self._submit, job))

    def _commit(self, commit: Commit) -> None:
        self._committed += 1
        self.faults.fire(self._committed)
        merge, merged, seconds = self._prepared.pop(commit.fragment)
        self.store.commit(commit.fragment, commit.version, merged)
        freed = [self._inbox.drop(key) for key in merge.deltas]
        self._tell(measured(merge, merged, seconds))

        def follow_up() -> None:
            freed.clear()  # Files are unmapped here, while decisions go on.
            self._follow_up(merge, merged)

        self._submit(follow_up)

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
        prepared = self._written(merge, merged)
        if prepared is None:
            return
        change = merged.norm * (merged.measures.step_ratio or 1.0)
        stripes = self.store.stripes(merge.fragment, merged.payload)
        prepared = replace(prepared, change=change, stripes=stripes)
        self.faults.fire(self._committed + 1, prepared=True)
        self._prepared[merge.fragment] = merge, merged, seconds
        self._tell(
            MergePrepared(
                fragment=merge.fragment, version=merge.version, prepared=prepared
            )
        )

    def _written(self, merge: Merge, merged: MergeResult) -> Prepared | None:
        """Write the publish of a merge, however often that takes; None once the process
        ends. Raises OSError, naming the fragment and the file, once it took too
        long."""
        began, within_s = time.monotonic(), self._write_within_s

        def trouble(error: OSError) -> str:
            waited_s = time.monotonic() - began
            if waited_s >= within_s:
                what = f"the publish of fragment {merge.fragment}"
                raise given_up(what, waited_s, within_s, error) from error
            return (
                f"fragment {merge.fragment} is not merged yet: its publish of "
                f"{len(merged.payload):,} bytes cannot be written to {error.filename} "
                f"({error.strerror}); {remedy(error)} within {within_s:g} s (4 * "
                f"placement.outage_budget_s), and it goes on; after that the "
                f"coordinator ends"
            )

        return repeat(
            lambda: self._publishes.write(
                merge.fragment,
                merge.version,
                merged.payload,
                final=merge.final,
                unused=merged.unused,
            ),
            trouble,
            self._closing.wait,
            lambda told: self._tell(told),
        )

    def _follow_up(self, merge: Merge, merged: MergeResult) -> None:
        """Do the rest of a merge, once it is committed and nobody waits for it."""
        # Islands are asked for the anchors of a worker that lost its disk.
        anchor = sha256_arrays(merged.state.anchor) if self._kept is None else ""
        digested = MergeDigested(
            fragment=merge.fragment,
            version=merge.version,
            digest=merged.digest,
            anchor=anchor,
        )
        self.store.expire_pins()
        give_memory_back()
        self._tell(digested)

    def _submit(self, job: Callable[[], None]) -> None:
        """Call a function on a merging thread; its error ends the process."""
        self._merger.submit(self._attempt, job)

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._failed(error)


def measured(merge: Merge, merged: MergeResult, seconds: float) -> MergeMeasured:
    """Return the numbers of a merge."""
    return MergeMeasured(
        fragment=merge.fragment,
        version=merge.version,
        islands=tuple(c.island for c in merge.contributions),
        tokens=sum(c.tokens for c in merge.contributions),
        share=merge.share,
        norm=merged.norm,
        seconds=seconds,
        measures=merged.measures._asdict(),
        directions=merged.directions,
        experts=merged.routing.measures,
        expert_loads=merged.routing.loads,
    )


def lost_here(why: str) -> DurableError:
    """Return the error of a coordinator without workers that has lost a fragment."""
    return DurableError(
        f"{why}. Without a copy, start with an empty --workdir while islands run: "
        f"their anchors begin a new term of the run"
    )


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
    worker, whose lead keeps cycles. whose: see `checkpoint`. workdir: also for files of
    weights that are unpacked."""
    placement, plan = config.placement, store.plan
    rooms = Rooms(
        placement.merge_buffer_bytes // placement.workers,
        workdir,
        SPARED_BYTES_EACH * sum(plan.sizes[fragment] for fragment in fragments),
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
        first=lambda: first_pieces(config.run, build(config.run), workdir),
        in_regions={name: config.island(name).hosts for name in config.regions()},
    )
