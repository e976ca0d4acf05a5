"""The time that merges take at the coordinator, by the config's rule."""

from __future__ import annotations

import dataclasses

from diloco_jax.config import SyncConfig
from diloco_jax.coordinator.holding.holder import CORES_PER_MERGE, merges_at_once
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.hardware.rates import MachineRates


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeCost:
    """Core seconds per 1e9 parameters of a merge, with the checks of its deltas."""

    rule: str
    """`sync.merge`."""
    deltas: int
    core_seconds: float
    of_weighted_sum: float
    """The part that every rule takes."""
    known: bool
    """False: nobody measured the rule, and it counts as a weighted sum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergePlan:
    """Merges of a cycle, in the process that has the most parameters."""

    cost: MergeCost
    fragment_core_seconds: float
    """Core seconds of the merge of the largest fragment."""
    cores: float
    """Cores that the merges of a process keep busy at most."""
    seconds: float
    """Seconds in which these cores do the merges of a cycle."""
    share: float
    """The same as a share of the cycle, and so of each tick."""

    @property
    def seconds_of_weighted_sum(self) -> float:
        """The same seconds if the rule were a weighted sum."""
        return self.seconds * self.cost.of_weighted_sum / self.cost.core_seconds

    @property
    def line(self) -> str:
        """A line for people."""
        cost = self.cost
        unknown = "; nobody measured this rule, and it counts as a weighted sum"
        return (
            f"merges of {cost.deltas} deltas by {cost.rule}: {cost.core_seconds:.3g} "
            f"core seconds per 1e9 parameters, {self.fragment_core_seconds:.3g} for "
            f"the largest fragment, {self.share:.2g} of each tick on {self.cores:g} "
            f"cores{'' if cost.known else unknown}"
        )


def cost_of(
    sync: SyncConfig, rates: MachineRates, deltas: int, by_rule: float
) -> MergeCost:
    """Return what a merge of so many deltas takes.

    by_rule: share of the parameters that are merged by the rule; the others are merged
    by the weighted mean.
    """
    summed = rates.merging(sync.codec_down) + deltas * rates.per_delta(sync.codec_up)
    beyond: float | None = 0.0
    if MERGE_RULES.find(sync.merge).needs != "sum":
        found = rates.rules.get(sync.merge)
        beyond = found.beyond(deltas) if found else None
    return MergeCost(
        rule=sync.merge,
        deltas=deltas,
        core_seconds=summed + by_rule * (beyond or 0.0),
        of_weighted_sum=summed,
        known=beyond is not None,
    )


def plan_merges(
    cost: MergeCost,
    largest_fragment: int,
    params: int,
    cycle_seconds: float,
    cores: int,
    own_cores: float,
) -> MergePlan:
    """Return the merges of the process that has the most parameters, `params`.

    cores: of the machine; own_cores: of them, those of this process.
    """
    usable = min(own_cores, merges_at_once(cores) * CORES_PER_MERGE)
    seconds = cost.core_seconds * params / 1e9 / usable
    return MergePlan(
        cost=cost,
        fragment_core_seconds=cost.core_seconds * largest_fragment / 1e9,
        cores=usable,
        seconds=seconds,
        share=seconds / cycle_seconds,
    )
