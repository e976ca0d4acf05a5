"""Results of a plan: one island among the others, and the run."""

from __future__ import annotations

import dataclasses

from diloco_jax.hardware.rates import MachineRates
from diloco_jax.planning.changes import Change
from diloco_jax.planning.checks import Shortfall
from diloco_jax.planning.compiling import IslandPlan
from diloco_jax.planning.coordinator import CoordinatorPlan
from diloco_jax.planning.goodput import ExpectedGoodput
from diloco_jax.planning.network import IslandNetwork


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedIsland:
    """Plan of one island among the others."""

    compiled: IslandPlan
    step_seconds: float
    """Seconds of a step by the roofline, with its share of `exchange_seconds`; or of
    the emulated step if that is longer."""
    exchange_seconds: float
    """Seconds of a cycle in which takes and adoptions hold up the steps: arithmetic
    from the collectives and the traffic of their compiled programs."""
    tokens_per_second: float
    """Tokens per second without interruptions."""
    network: IslandNetwork


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Plan of all islands together."""

    params: int
    pacing_step_seconds: float
    cycle_seconds: float
    tokens_per_second: float
    """Tokens per second of all islands, without interruptions."""
    goodput: ExpectedGoodput
    tokens_per_day: float
    """Tokens merged per day at the expected goodput."""
    days: float | None
    """Days to the config's total tokens; None if nothing is ever merged."""
    coordinator: CoordinatorPlan
    restart_seconds: float
    """Seconds from the death of the coordinator's process to its service."""
    refusals: list[Shortfall]
    mending: Change
    """One set of changes after which no check refuses; empty: none is known, or
    needed."""
    rates: MachineRates
    price_per_hour: dict[str, float] | None
    """Its parts, by the prices of `--price`; None without them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A finding, and changes each of which helps by itself."""

    text: str
    changes: tuple[Change, ...]
    """With each one the plan was made again, and became better."""
