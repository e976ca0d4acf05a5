"""Contents of the HBM of one chip of an island, by kind, and whether they fit."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import SyncConfig
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import FragmentPlan, Piece
from diloco_jax.island.device.kinds import Kind

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
AMOUNT = r"([\d.]+)([KMGT]?)"
REFUSAL = re.compile(rf"{AMOUNT}\)? exceeds available HBM \(?{AMOUNT}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Bytes that an island holds between steps, by kind, for one chip."""

    parameters: int
    optimizer: int
    watched: int
    """The copy of the merged model, in the compute dtype, with
    `placement.watch_every`."""
    anchors: int
    residuals: int
    """Residuals of the error feedback."""
    open_takes: int
    """Bases, and residuals as they were at the take, of the fragments under way."""
    late_takes: int
    """The same for all other fragments, if every delta of the island misses its merge.
    No other figure counts these bytes, so there must be room for them as well.
    """

    @property
    def exchange(self) -> int:
        """Bytes of anchors, residuals and takes."""
        return self.anchors + self.residuals + self.open_takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hbm(HeldBytes):
    """Bytes in the HBM of one chip, unless a field says otherwise."""

    temporaries: int | None
    """Activations, gradients and gathered weights: the compiler's share beyond the
    fields above. None if the compiler refuses the step.
    """
    used: int
    """All bytes used, as the compiler reports them."""
    available: int
    missing: int
    """Bytes by which the step does not fit; 0 if it fits."""
    pinned_host: int
    """Bytes in the chip's share of its host's memory."""

    @property
    def share_of_activations(self) -> float:
        """The share of the activations for which there is room, with everything else
        that grows with the batch; at most 1.
        """
        resident = self.used - self.parameters - self.optimizer - self.watched
        if not self.pinned_host:
            resident -= self.exchange
        return min(1.0, 1 - self.missing / max(1, resident))

    def with_takes(self, now: SyncConfig, then: SyncConfig) -> Hbm:
        """Return the memory with another number of fragments under way, which changes
        nothing else in a step."""
        factor = open_fragments(then) / open_fragments(now)
        more = round(self.open_takes * (factor - 1))
        used = self.used + (0 if self.pinned_host else more)
        return dataclasses.replace(
            self,
            open_takes=self.open_takes + more,
            late_takes=max(0, self.late_takes - more),
            used=used,
            missing=max(0, used - self.available),
            pinned_host=self.pinned_host + (more if self.pinned_host else 0),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resident(HeldBytes):
    """The same, and where it is held."""

    in_host_memory: bool
    """True if anchors, residuals and takes lie in the host's memory."""

    @property
    def beside(self) -> int:
        """Bytes in HBM that a step does not touch."""
        return self.watched + (0 if self.in_host_memory else self.exchange)

    @property
    def pinned_host(self) -> int:
        """Bytes in the host's memory."""
        return self.exchange if self.in_host_memory else 0


def resident(
    plan: FragmentPlan,
    sync: SyncConfig,
    state: Any,
    kinds: dict[Piece, Kind],
    *,
    in_host_memory: bool,
    watched_dtype: str | None = None,
) -> Resident:
    """Compute the bytes from shapes and shardings alone.

    state: `Trainer.abstract_state()`. watched_dtype: of the merged model's copy; None:
    there is none.
    """
    share = {piece: _piece_bytes(piece, kind) for piece, kind in kinds.items()}
    anchors = sum(share.values())
    fragments = [sum(share[p] for p in pieces) for pieces in plan.fragments]
    feedback = bool(sync.error_feedback)
    under_way = max(fragments) * open_fragments(sync)
    is_late = ADOPT_RULES.find(sync.adopt).keeps_pending + feedback
    return Resident(
        parameters=_bytes(state.params),
        optimizer=_bytes(state.opt_state),
        watched=_watched_bytes(state.params, watched_dtype),
        anchors=anchors,
        residuals=anchors * feedback,
        open_takes=under_way * (1 + feedback),
        late_takes=max(0, anchors - under_way) * is_late,
        in_host_memory=in_host_memory,
    )


def open_fragments(sync: SyncConfig) -> int:
    """Count the fragments that an island has taken and not adopted yet.

    One fragment is taken every H / P steps and adopted tau steps later. An adoption
    that is late, because its merge waited for other islands, counts as a late take.
    """
    under_way = math.ceil(sync.overlap_steps * sync.fragments / sync.steps_per_cycle)
    return min(max(1, under_way), sync.fragments)


def accepted(held: Resident, stats: Any, available: int) -> Hbm:
    """Return the memory of a step that compiled.

    stats: `Compiled.memory_analysis()`.
    """
    used = stats.peak_memory_in_bytes + stats.generated_code_size_in_bytes
    known = held.parameters + held.optimizer + held.beside
    return _hbm(held, used, available, temporaries=used - known)


def refused(held: Resident, message: str) -> Hbm | None:
    """Return the memory of a step that the compiler refused; None if HBM was not the
    reason.
    """
    found = REFUSAL.search(message)
    if not found:
        return None
    used, available = (int(float(found[i]) * UNITS[found[i + 1]]) for i in (1, 3))
    return _hbm(held, used, available, temporaries=None)


def _hbm(held: Resident, used: int, available: int, temporaries: int | None) -> Hbm:
    kinds = [field.name for field in dataclasses.fields(HeldBytes)]
    return Hbm(
        **{kind: getattr(held, kind) for kind in kinds},
        temporaries=temporaries,
        used=used,
        available=available,
        missing=max(0, used - available),
        pinned_host=held.pinned_host,
    )


def _watched_bytes(params: Any, dtype: str | None) -> int:
    if dtype is None:
        return 0
    like = jnp.dtype(dtype)
    return _bytes(jax.tree.map(lambda leaf: leaf.update(dtype=like), params))


def _bytes(tree: Any) -> int:
    """Bytes of the shards that one chip holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _piece_bytes(piece: Piece, kind: Kind) -> int:
    return (
        math.prod(kind.piece.shard_shape(piece.shape)) * np.dtype(np.float32).itemsize
    )
