"""Make the holder of some fragments, with their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_jax import checkpoint, run_files
from diloco_jax.config import Config
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.holding.inbox import Inbox
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.holding.rooms import SPARED_BYTES_EACH, Rooms
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.kept import Keeper


def make_holder(
    config: Config,
    store: Store,
    kept: Keeper,
    workdir: Path,
    whose: dict[str, Any],
    fragments: Sequence[int],
) -> StoreHolder:
    """Return the holder of these fragments, with their folders. whose: see
    `checkpoint`."""
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
