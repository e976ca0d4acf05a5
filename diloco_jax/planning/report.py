"""The whole plan of a run, put together from the plans of its islands."""

from __future__ import annotations

import dataclasses
from typing import Any

from diloco_jax.config import Config
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.models.build import build
from diloco_jax.models.plan import build_plan
from diloco_jax.planning.advice import advise
from diloco_jax.planning.compiling import IslandPlan
from diloco_jax.planning.coordinator import (
    MERGE_CORE_SECONDS_PER_GB,
    plan_coordinator,
)
from diloco_jax.planning.goodput import SimulatedIsland, expected_goodput
from diloco_jax.planning.network import island_network
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.results import PlannedIsland, RunPlan
from diloco_jax.protocol.coordinator import schedule

SECONDS_PER_DAY = 86400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of all islands and of the run."""

    config: str
    fits: bool
    islands: dict[str, PlannedIsland]
    run: RunPlan
    advice: list[str]
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as Python builtins."""
        return dataclasses.asdict(self)


def fragments_of(config: Config) -> FragmentPlan:
    """Cut the run's model into fragments; ConfigError if the config wants too many."""
    return build_plan(config.run, build(config.run))


def plan_run(
    path: str,
    config: Config,
    compiled: dict[str, IslandPlan],
    fragments: FragmentPlan,
    assumptions: Assumptions,
    versions: dict[str, str],
) -> Plan:
    """Plan the run from its compiled islands. Raises ConfigError.

    versions: versions of the packages that compiled.
    """
    run, sync = resolve_outer(config).run, config.run.sync
    machines = {
        name: SimulatedIsland(
            chips=island.chips,
            tokens_per_step=island.tokens_per_step,
            step_seconds=max(
                island.roofline.step_seconds, config.islands[name].step_seconds
            ),
            hosts=island.hosts,
        )
        for name, island in compiled.items()
    }
    pace = schedule.pace(sync.quorum, [m.step_seconds for m in machines.values()])
    cycle_s = sync.steps_per_cycle * pace
    coordinator = plan_coordinator(
        run, config.placement, fragments, len(machines), cycle_s
    )
    deltas_gb = len(machines) * 4 * max(fragments.sizes) / 1e9
    goodput = expected_goodput(
        sync,
        fragments.total,
        machines,
        # The rate was measured on two cores.
        merge_seconds=deltas_gb * MERGE_CORE_SECONDS_PER_GB / 2,
        assumptions=assumptions,
    )
    rate = sum(machine.tokens_per_second for machine in machines.values())
    merged_per_day = rate * goodput.goodput * SECONDS_PER_DAY
    islands = {
        name: PlannedIsland(
            compiled=compiled[name],
            step_seconds=machine.step_seconds,
            tokens_per_second=machine.tokens_per_second,
            network=island_network(sync, fragments.total, pace, machine.step_seconds),
        )
        for name, machine in machines.items()
    }
    summary = RunPlan(
        params=fragments.total,
        pacing_step_seconds=pace,
        cycle_seconds=cycle_s,
        tokens_per_second=rate,
        goodput=goodput,
        tokens_per_day=merged_per_day,
        days=run.total_tokens / merged_per_day if merged_per_day else None,
        coordinator=coordinator,
    )
    return Plan(
        config=path,
        fits=all(island.fits for island in compiled.values()),
        islands=islands,
        run=summary,
        advice=advise(config, islands, summary),
        versions=versions,
    )
