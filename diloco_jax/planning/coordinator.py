"""Needs of the coordinator's machine: memory from its real buffers, cores from measured
rates.

The rates come from docs/planning.md and were measured on a machine with two cores;
newer cores are faster.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from diloco_jax.config import Placement, RunConfig
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.coordinator.store import (
    PINNED_VERSIONS,
    RETAINED_PUBLISHES,
)
from diloco_jax.core.codecs.codec import get_codec
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.merge import RULES, measures, merging
from diloco_jax.core.outer.optimizer import make_outer
from diloco_jax.core.payload import PayloadLayout

WIRE_CORE_SECONDS_PER_GB = 1.45
"""Core seconds per GB with mutual TLS, the mean of both ways (docs/results/wire.md)."""
MERGE_CORE_SECONDS_PER_GB = 2 / 4.6
"""Core seconds per GB of f32 deltas: two cores decode, merge and step 4.6 GB/s, one
arrival at a time.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorPlan:
    """Bytes of the coordinator's memory, and its cores."""

    theta: int
    anchors: int
    outer_state: int
    merge_state: int
    """State of the merge rule, and the measured tiles of the last merged deltas."""
    publishes: int
    """Encoded publishes, kept for islands that missed some."""
    merge_buffer: int
    """Encoded deltas: at most one per island and fragment, within
    `placement.merge_buffer_bytes`."""
    merging: int
    """Memory in use while the largest fragment is merged."""
    joins: int
    """Anchors kept for joins under way, at most."""
    memory: int
    """Sum of the fields above."""
    wire_cores: float
    merge_cores: float
    cores: int
    """Whole cores, with one for everything else."""


def plan_coordinator(
    run: RunConfig,
    placement: Placement,
    plan: FragmentPlan,
    islands: int,
    cycle_seconds: float,
) -> CoordinatorPlan:
    """Estimate the coordinator's memory and cores.

    run: a config with a resolved outer optimizer.
    """
    up, down = (
        [PayloadLayout.of(get_codec(codec), p).total_bytes for p in plan.fragments]
        for codec in (run.sync.codec_up, run.sync.codec_down)
    )
    params = 4 * plan.total
    fragment = 4 * max(plan.sizes)
    outer_state = _outer_state_bytes(run, plan)
    rules = {p: merging.rule_for(p, RULES.find(run.sync.merge)) for p in plan.pieces}
    parts = {
        "theta": params,
        "anchors": params,
        "outer_state": outer_state,
        "publishes": RETAINED_PUBLISHES * sum(down),
        "merge_buffer": min(islands * sum(up), placement.merge_buffer_bytes),
        "merge_state": sum(
            merging.state_bytes(r, p.shape) + measures.sample_bytes(p.shape)
            for p, r in rules.items()
        ),
        # The merged delta, the new Theta, outer state and anchor, and the rule's memory
        # for one piece.
        "merging": 4 * fragment
        + max(merging.merging_bytes(r, islands, p.size) for p, r in rules.items()),
        "joins": PINNED_VERSIONS * params,
    }
    wire_gb = islands * (sum(up) + sum(down)) / 1e9
    wire = wire_gb * WIRE_CORE_SECONDS_PER_GB / cycle_seconds
    merge_cores = islands * params / 1e9 * MERGE_CORE_SECONDS_PER_GB / cycle_seconds
    return CoordinatorPlan(
        **parts,
        memory=sum(parts.values()),
        wire_cores=wire,
        merge_cores=merge_cores,
        cores=math.ceil(wire + merge_cores) + 1,
    )


def _outer_state_bytes(run: RunConfig, plan: FragmentPlan) -> int:
    outer = make_outer(outer_settings(run))

    def init() -> Any:
        return outer.init(tuple(jnp.zeros(piece.shape) for piece in plan.pieces))

    state = jax.eval_shape(init)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
