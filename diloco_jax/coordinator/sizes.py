"""Bytes of what a coordinator writes and sends: its state, payloads, snapshots."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diloco_jax.config import Placement, RunConfig
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.outer import OuterSettings, make_outer
from diloco_jax.core.payload import PayloadLayout


class StateSizes(NamedTuple):
    """Bytes of a model's state, as the coordinator writes it."""

    state: int
    """All fragments in a snapshot: Theta, anchor and outer state."""
    largest: int
    """The largest of them."""
    publish: int
    """One publish of each fragment."""


def state_sizes(run: RunConfig, plan: FragmentPlan) -> StateSizes:
    """Return the bytes of the state. run: with a resolved outer optimizer."""
    outer, largest = _outer_state_bytes(outer_settings(run), plan), max(plan.sizes)
    return StateSizes(
        state=8 * plan.total + outer,
        largest=8 * largest + math.ceil(outer * largest / plan.total),
        publish=sum(payload_bytes(run.sync.codec_down, plan)),
    )


@functools.lru_cache(maxsize=16)
def payload_bytes(codec: str, plan: FragmentPlan) -> list[int]:
    """Return the bytes of each encoded fragment."""
    chosen = get_codec(codec)
    return [PayloadLayout.of(chosen, p).total_bytes for p in plan.fragments]


def next_snapshots(placement: Placement, state: int, largest: int, held: int) -> int:
    """Return the bytes of snapshots that a disk must have free for the next round: what
    it lacks of the kept ones, at most one of each fragment, and one that is being
    written. state, largest: see `StateSizes`. held: bytes of snapshots that it has."""
    return min(state, max(0, placement.snapshots_kept * state - held)) + largest


@functools.lru_cache(maxsize=16)
def _outer_state_bytes(settings: OuterSettings, plan: FragmentPlan) -> int:
    outer = make_outer(settings)

    def init() -> Any:
        return outer.init(tuple(jnp.zeros(piece.shape) for piece in plan.pieces))

    state = jax.eval_shape(init)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
