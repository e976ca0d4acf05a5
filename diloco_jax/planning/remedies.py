"""Changes that may help an island to fit, or a link to carry a fragment in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.config import IslandConfig, SyncConfig
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import CODECS
from diloco_jax.core.tiles import MOST_ELEMENTS
from diloco_jax.planning.changes import Change
from diloco_jax.planning.memory import Hbm

Remedy = Callable[[IslandConfig, Hbm], dict[str, Any]]
"""Return fields of an island with other values; empty if this remedy has nothing."""


def _remat(island: IslandConfig, hbm: Hbm) -> dict[str, Any]:
    return {"remat": "full"} if island.remat != "full" else {}


def _accumulate(island: IslandConfig, hbm: Hbm) -> dict[str, Any]:
    """Cut the batch into as many rounds as the missing bytes ask for."""
    most = island.batch_size // island.batch_multiple
    factor = _least_divisor(most, hbm.share_of_activations)
    if factor == 1:
        return {}
    return {"accumulation": island.accumulation * factor}


def _spread(island: IslandConfig, hbm: Hbm) -> dict[str, Any]:
    """Spread parameters and optimizer over all devices that have copies of them."""
    if island.mesh_data == 1:
        return {}
    return {"mesh_data": 1, "mesh_fsdp": island.mesh_data * island.mesh_fsdp}


def _anchors_on_host(island: IslandConfig, hbm: Hbm) -> dict[str, Any]:
    on_host = "pinned_host"
    return {"anchor_memory": on_host} if island.anchor_memory != on_host else {}


def _smaller_batch(island: IslandConfig, hbm: Hbm) -> dict[str, Any]:
    most = island.batch_size // island.batch_multiple
    factor = _least_divisor(most, hbm.share_of_activations)
    return {"batch_size": island.batch_size // factor} if factor > 1 else {}


TO_FIT: tuple[Remedy, ...] = (
    *(_remat, _accumulate, _spread, _anchors_on_host, _smaller_batch),
)
"""In the order in which they are tried: what costs training the least comes first."""


def to_carry(sync: SyncConfig, late: float) -> Iterator[Change]:
    """Yield changes for a largest fragment that takes `late` times its window."""
    overlap = math.floor(max(1, sync.overlap_steps) * late) + 1
    change: dict[str, Any] = {"sync.overlap_steps": overlap}
    if overlap >= sync.steps_per_cycle:
        change["sync.steps_per_cycle"] = overlap + 1
    yield change
    smaller = {
        f"sync.{field}": found
        for field in ("codec_down", "codec_up")
        if (found := _next_smaller(getattr(sync, field)))
    }
    for field, codec in smaller.items():
        yield {field: codec}
    if len(smaller) > 1:
        yield smaller


def _next_smaller(codec: str) -> str:
    """Return the largest codec of the table that makes fewer bytes, or ""."""
    sizes = {
        name: Codec(name).tile_bytes(MOST_ELEMENTS) for name in (*CODECS.table, codec)
    }
    smaller = [name for name in sizes if sizes[name] < sizes[codec]]
    return max(smaller, key=lambda name: sizes[name], default="")


def _least_divisor(number: int, share: float) -> int:
    """Return the least divisor d of a number with 1/d at most that share; the number
    itself if there is none."""
    return next(
        d
        for d in range(1, number + 1)
        if number % d == 0 and (d == number or (d > 1 and 1 / d <= share))
    )
