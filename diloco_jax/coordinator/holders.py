"""Make the holder that the config asks for: in this process, or worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from diloco_jax import checkpoint
from diloco_jax.config import Config
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.holding.make_holder import make_holder
from diloco_jax.coordinator.holding.restoring import make_store
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.holder import WorkersHolder
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.holding import Committed, RestoreFragments
from diloco_jax.protocol.values import Version


@dataclasses.dataclass(frozen=True)
class Holders:
    """Makes the holder for one life of a coordinator.

    opened: closed at the end of that life; it then ends worker processes.
    """

    config: Config
    plan: FragmentPlan
    kept: KeptCycles
    workdir: Path
    run_id: str
    opened: contextlib.ExitStack

    def restoring(self, term: int) -> StoreHolder | WorkersHolder:
        """Return a holder without arrays, for `restore`. Workers that an earlier lead
        has left are ended, unless they can go on. term: the run's."""
        placement = self.config.placement
        rendezvous.end_others(self.workdir, placement.workers_here)
        if placement.workers > 1:
            return self._workers(term)
        return self._in_process(make_store(self.config, self.plan, None))

    def beginning(
        self, store: Store, versions: Sequence[Version], term: int
    ) -> StoreHolder | WorkersHolder:
        """Make the fragments of a new run or term durable, and return their holder.

        Worker processes then restore them from the disk, and the store is empty.
        versions: by fragment. term: the run's.
        """
        own = self._in_process(store)
        own.begin()
        if self.config.placement.workers == 1:
            return own
        own.close()
        # The caller has the store, too: workers would need their memory beside it.
        store.clear()
        give_memory_back()
        workers = self._workers(term)
        committed = tuple(
            Committed(fragment=f, version=version, digests={})
            for f, version in enumerate(versions)
        )
        workers.restore(RestoreFragments(fragments=committed))
        return workers

    def _in_process(self, store: Store) -> StoreHolder:
        whose = checkpoint.whose(self.config.run, self.run_id, self.plan)
        everything = range(len(self.plan.fragments))
        return make_holder(
            self.config, store, self.kept, self.workdir, whose, everything
        )

    def _workers(self, term: int) -> WorkersHolder:
        workers = WorkersHolder(
            self.config,
            self.workdir,
            self.run_id,
            self.plan.sizes,
            self.kept,
            term,
        )
        stop_s = self.config.placement.deadlines.stop_s
        self.opened.callback(workers.end, stop_s)
        return workers
