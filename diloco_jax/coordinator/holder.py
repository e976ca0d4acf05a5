"""Hold parameters and deltas in the lead's own process.

Merges are computed on a few threads, one fragment on each. The same thread writes the
publish to disk, which prepares the merge, and says so with an event. A publish that
cannot be written is tried again, for as long as islands last without a coordinator: the
merge stays open, and nothing else waits for it.
Deltas are dropped once the merge is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from diloco_jax import machine
from diloco_jax.coordinator import notes
from diloco_jax.coordinator.disk_wait import given_up
from diloco_jax.coordinator.inbox import Inbox
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.publishes import Publishes
from diloco_jax.coordinator.store import ComputedMerge, Store
from diloco_jax.core.fragment_merge import Squares
from diloco_jax.core.fragments import digest_arrays
from diloco_jax.memory import give_back
from diloco_jax.observability.metrics import Metrics
from diloco_jax.protocol.coordinator.events import (
    Commit,
    CycleKept,
    Drop,
    Forget,
    KeepFragment,
    Merge,
    MergePrepared,
)
from diloco_jax.protocol.values import DeltaKey, Prepared

logger = logging.getLogger(__name__)

CORES_PER_MERGE = 4
"""XLA spreads a block of a merge over cores, but Python between two blocks does not."""
MERGES_AT_ONCE = 4
"""Merges under way, at most: each holds three f32 arrays of its fragment."""
WRITE_AGAIN_S = 2.0
"""Pause before a publish that could not be written is tried again, in seconds."""


class StoreHolder:
    """The `Holder` of the service's engine.

    post: queues an event for the engine's thread, with a function to call there just
    before it. failed: called with the error of a merge. note: writes to the tape.
    alert: tells people. The last two are called on the engine's thread.
    write_within_s: seconds after which a publish that cannot be written has failed.
    """

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        publishes: Publishes,
        metrics: Metrics,
        kept: KeptCycles,
        post: Callable[[MergePrepared | CycleKept | None, Callable[[], None]], None],
        failed: Callable[[BaseException], None],
        note: Callable[[notes.Note], None],
        alert: Callable[[str], None],
        *,
        write_within_s: float,
    ) -> None:
        self._store, self._inbox, self._metrics = store, inbox, metrics
        self._publishes, self._kept = publishes, kept
        self._post, self._failed = post, failed
        self._note, self._alert = note, alert
        self._write_within_s = write_within_s
        self._merger = ThreadPoolExecutor(
            merges_at_once(machine.cores()), "diloco-merge"
        )
        self._prepared: dict[int, tuple[ComputedMerge, list[DeltaKey]]] = {}
        self._closing = threading.Event()

    def warm_up(self, compiled: Callable[[], None]) -> None:
        """Compile what merges need, ahead of the first merge. compiled: called on the
        engine's thread once that is done."""

        def compile_all() -> None:
            self._store.warm_up(self._closing.is_set)
            self._post(None, compiled)

        self._submit(compile_all)

    def close(self) -> None:
        """Wait for the merge under way; begin no other."""
        self._closing.set()
        self._merger.shutdown(wait=True, cancel_futures=True)

    def merge(self, merge: Merge) -> None:
        keys = _keys(merge)
        payloads = [self._inbox.payload(key) for key in keys]
        squares = [self._inbox.squares(key) for key in keys]
        self._submit(lambda: self._prepare(merge, keys, payloads, squares))

    def commit(self, commit: Commit) -> None:
        merged, keys = self._prepared.pop(commit.fragment)
        self._store.commit(commit.fragment, merged)
        for key in keys:
            self._inbox.drop(key)
        self._note(
            notes.Measured(
                fragment=commit.fragment,
                version=merged.version,
                **merged.measures._asdict(),
            )
        )
        self._submit(lambda: self._follow_up(commit.fragment, merged))

    def keep(self, keep: KeepFragment) -> None:
        theta = self._store.arrays(keep.fragment)["theta"]
        self._kept.keep(keep, theta, self._cycle_kept)

    def drop(self, drop: Drop) -> None:
        self._inbox.drop(drop.delta)

    def forget(self, forget: Forget) -> None:
        self._inbox.drop_island(forget.island, forget.before, frozenset(forget.kept))

    def _cycle_kept(self, cycle: int, trouble: str) -> None:
        def tell() -> None:
            if trouble:
                self._alert(trouble)

        self._post(CycleKept(cycle=cycle), tell)

    def _prepare(
        self,
        merge: Merge,
        keys: list[DeltaKey],
        payloads: Sequence[npt.NDArray[np.uint8]],
        squares: Sequence[Squares],
    ) -> None:
        self._store.put_aside(merge.fragment, self._publishes.mapped)
        started = time.monotonic()
        merged = self._store.merge(
            merge.fragment,
            merge.version,
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

        def keep() -> None:
            self._prepared[merge.fragment] = merged, keys
            self._measured(merge, merged, seconds)

        event = MergePrepared(
            fragment=merge.fragment, version=merge.version, prepared=prepared
        )
        self._post(event, keep)

    def _written(self, merge: Merge, merged: ComputedMerge) -> Prepared | None:
        """Write the publish, however often that takes; None if this process ends.
        Raises OSError, naming the fragment and the file, after `write_within_s`."""
        told, began = False, time.monotonic()
        while not self._closing.is_set():
            try:
                return self._publishes.write(
                    merge.fragment, merge.version, merged.payload, final=merge.final
                )
            except OSError as error:
                waited_s = time.monotonic() - began
                if waited_s >= self._write_within_s:
                    what = f"the publish of fragment {merge.fragment}"
                    raise given_up(
                        what, waited_s, self._write_within_s, error
                    ) from error
                if not told:
                    self._tell_unwritten(merge, merged, error)
                told = True
                self._closing.wait(WRITE_AGAIN_S)
        return None

    def _tell_unwritten(
        self, merge: Merge, merged: ComputedMerge, error: OSError
    ) -> None:
        text = (
            f"fragment {merge.fragment} is not merged yet: its publish of "
            f"{len(merged.payload):,} bytes cannot be written to {error.filename} "
            f"({error.strerror}); free some space there within "
            f"{self._write_within_s:g} s (4 * placement.outage_budget_s), and it goes "
            f"on; after that the coordinator ends"
        )
        self._post(None, lambda: self._alert(text))

    def _follow_up(self, fragment: int, merged: ComputedMerge) -> None:
        """Do what a merge has left, once it is committed and nobody waits for it."""
        note = notes.Digested(
            fragment=fragment,
            version=merged.version,
            digest=digest_arrays(merged.state.theta),
        )
        self._store.expire_pins()
        give_back()
        self._post(None, lambda: self._note(note))

    def _submit(self, job: Callable[[], None]) -> None:
        """Call a function on a merging thread; its error ends the process."""

        def attempt() -> None:
            try:
                job()
            except BaseException as error:
                self._failed(error)

        self._merger.submit(attempt)

    def _measured(self, merge: Merge, merged: ComputedMerge, seconds: float) -> None:
        self._metrics.append(
            {
                "kind": "merge",
                "time": time.time(),
                "fragment": merge.fragment,
                "version": merge.version.number,
                "islands": [c.island for c in merge.contributions],
                "tokens": sum(c.tokens for c in merge.contributions),
                "share": merge.share,
                "norm": merged.norm,
                **merged.measures._asdict(),
                "seconds": seconds,
            }
        )


def merges_at_once(cores: int) -> int:
    """Return the most merges that so many cores compute at a time."""
    return min(MERGES_AT_ONCE, max(1, cores // CORES_PER_MERGE))


def _keys(merge: Merge) -> list[DeltaKey]:
    return [
        DeltaKey(c.island, c.incarnation, merge.fragment, c.tick)
        for c in merge.contributions
    ]
