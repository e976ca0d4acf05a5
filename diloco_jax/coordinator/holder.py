"""Hold parameters and deltas in the lead's own process.

Merges are computed on a few threads, one fragment on each, and a result comes back as
an event. Deltas and publish wait for the log: what is committed is dropped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from diloco_jax.coordinator import notes
from diloco_jax.coordinator.inbox import Inbox
from diloco_jax.coordinator.memory import give_back
from diloco_jax.coordinator.store import ComputedMerge, Store
from diloco_jax.core.payload import digest_payload
from diloco_jax.observability.metrics import Metrics
from diloco_jax.protocol.coordinator.events import (
    Commit,
    Drop,
    Forget,
    Merge,
    MergeComputed,
)
from diloco_jax.protocol.values import DeltaKey

CORES_PER_MERGE = 4
"""XLA spreads a block of a merge over cores, but Python between two blocks does not."""
MERGES_AT_ONCE = 4
"""Merges under way, at most: each holds three f32 arrays of its fragment."""


class StoreHolder:
    """The `Holder` of the service's engine.

    post: queues an event for the engine's thread, with a function to call there just
    before it. failed: called with the error of a merge. note: writes to the tape.
    """

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        metrics: Metrics,
        post: Callable[[MergeComputed | None, Callable[[], None]], None],
        failed: Callable[[BaseException], None],
        note: Callable[[notes.Note], None],
    ) -> None:
        self._store, self._inbox, self._metrics = store, inbox, metrics
        self._post, self._failed, self._note = post, failed, note
        self._merger = ThreadPoolExecutor(merges_at_once(), "diloco-merge")
        self._computed: dict[int, tuple[ComputedMerge, list[DeltaKey]]] = {}
        self._closing = False

    def warm_up(self, compiled: Callable[[], None]) -> None:
        """Compile what merges need, ahead of the first merge. compiled: called on the
        engine's thread once that is done."""
        future = self._merger.submit(self._store.warm_up, lambda: self._closing)

        def done(future: Future[None]) -> None:
            if self._succeeded(future):
                self._post(None, compiled)

        future.add_done_callback(done)

    def close(self) -> None:
        """Wait for the merge under way; begin no other."""
        self._closing = True
        self._merger.shutdown(wait=True, cancel_futures=True)

    def published(self, fragment: int) -> bytes:
        """Return the encoded publish of a merge that is computed and not committed
        yet."""
        return bytes(self._computed[fragment][0].payload)

    def merge(self, merge: Merge) -> None:
        """See engine.Holder."""
        keys = _keys(merge)
        payloads = [self._inbox.payload(key) for key in keys]
        squares = [self._inbox.squares(key) for key in keys]
        started = time.monotonic()
        future = self._merger.submit(
            self._store.merge,
            merge.fragment,
            merge.version,
            merge.contributions,
            payloads,
            squares,
            share=merge.share,
            final=merge.final,
        )

        def done(future: Future[ComputedMerge]) -> None:
            if not self._succeeded(future):
                return
            merged = future.result()

            def keep() -> None:
                self._computed[merge.fragment] = merged, keys
                self._measured(merge, merged, time.monotonic() - started)

            computed = MergeComputed(
                fragment=merge.fragment,
                version=merge.version,
                digest=digest_payload(merged.payload),
            )
            self._post(computed, keep)

        future.add_done_callback(done)

    def commit(self, commit: Commit) -> None:
        """See engine.Holder."""
        merged, keys = self._computed.pop(commit.fragment)
        self._store.commit(commit.fragment, merged)
        for key in keys:
            self._inbox.drop(key)
        self._merger.submit(give_back)
        self._note(
            notes.Measured(
                fragment=commit.fragment,
                version=merged.version,
                **merged.measures._asdict(),
            )
        )

    def drop(self, drop: Drop) -> None:
        """See engine.Holder."""
        self._inbox.drop(drop.delta)

    def forget(self, forget: Forget) -> None:
        """See engine.Holder."""
        self._inbox.drop_island(forget.island, forget.before, frozenset(forget.kept))

    def _succeeded(self, future: Future[ComputedMerge] | Future[None]) -> bool:
        if future.cancelled():
            return False
        if (failure := future.exception()) is None:
            return True
        self._failed(failure)
        return False

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


def merges_at_once() -> int:
    """Return the number of merges that this machine computes at a time."""
    cores = os.cpu_count() or 1
    return min(MERGES_AT_ONCE, max(1, cores // CORES_PER_MERGE))


def _keys(merge: Merge) -> list[DeltaKey]:
    return [
        DeltaKey(c.island, c.incarnation, merge.fragment, c.tick)
        for c in merge.contributions
    ]
