"""What a plan says of one island among the others, and of the run."""

from __future__ import annotations

import dataclasses

from diloco_jax.planning.compiling import IslandPlan
from diloco_jax.planning.coordinator import CoordinatorPlan
from diloco_jax.planning.goodput import ExpectedGoodput
from diloco_jax.planning.network import IslandNetwork


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedIsland:
    """One island among the others."""

    compiled: IslandPlan
    step_seconds: float
    """The roofline's, or the config's emulated one if that is longer."""
    tokens_per_second: float
    """Undisturbed."""
    network: IslandNetwork


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What the islands make together."""

    params: int
    pacing_step_seconds: float
    cycle_seconds: float
    tokens_per_second: float
    """Of all islands, undisturbed."""
    goodput: ExpectedGoodput
    tokens_per_day: float
    """Merged, at the expected goodput."""
    days: float | None
    """To the config's total tokens; None if none is ever merged."""
    coordinator: CoordinatorPlan
