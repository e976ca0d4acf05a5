"""The whole plan of a run, put together from the plans of its islands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from diloco_jax.config import Config
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.models.build import build, build_plan
from diloco_jax.planning.checks import mending, refusals
from diloco_jax.planning.compiling import IslandPlan
from diloco_jax.planning.goodput import SimulatedIsland, expected_goodput
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.price import price_per_hour
from diloco_jax.planning.results import Advice, PlannedIsland, RunPlan
from diloco_jax.planning.terms import Terms, needs_of

SECONDS_PER_DAY = 86400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of all islands and of the run."""

    config: str
    fits: bool
    versions: dict[str, str]
    islands: dict[str, PlannedIsland]
    run: RunPlan
    advice: tuple[Advice, ...] = ()

    def with_advice(self, advice: Sequence[Advice]) -> Plan:
        """Return the plan with this advice."""
        return dataclasses.replace(self, advice=tuple(advice))

    def as_json(self) -> dict[str, Any]:
        """Return the plan as Python builtins."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def fragments_of(config: Config) -> FragmentPlan:
    """Cut the run's model into fragments; ConfigError if the config wants too many."""
    return build_plan(config.run, build(config.run))


def plan_run(
    path: str,
    config: Config,
    compiled: Mapping[str, IslandPlan],
    fragments: FragmentPlan,
    assumptions: Assumptions,
    versions: dict[str, str],
    prices: Mapping[str, float] | None = None,
) -> Plan:
    """Plan the run from its compiled islands, without advice. Raises ConfigError.

    versions: versions of the packages that compiled. prices: see `price_per_hour`.
    """
    resolved = resolve_outer(config)
    run, sync = resolved.run, config.run.sync
    machines = {
        name: SimulatedIsland(
            chips=island.chips,
            tokens_per_step=island.tokens_per_step,
            step_seconds=max(
                island.roofline.step_seconds
                + island.exchange_seconds / sync.steps_per_cycle,
                config.islands[name].step_seconds,
            ),
            hosts=island.hosts,
        )
        for name, island in compiled.items()
    }
    terms = Terms(
        config=resolved,
        fragments=fragments,
        hosts={name: machine.hosts for name, machine in machines.items()},
        step_seconds={name: m.step_seconds for name, m in machines.items()},
        link_gbit_per_s=assumptions.link_gbit_per_s,
    )
    needs = needs_of(terms)
    goodput = expected_goodput(
        sync,
        fragments.total,
        machines,
        merge_seconds=needs.coordinator.merges.fragment_core_seconds,
        assumptions=assumptions,
    )
    rate = sum(machine.tokens_per_second for machine in machines.values())
    merged_per_day = rate * goodput.goodput * SECONDS_PER_DAY
    islands = {
        name: PlannedIsland(
            compiled=compiled[name],
            step_seconds=machine.step_seconds,
            exchange_seconds=compiled[name].exchange_seconds,
            tokens_per_second=machine.tokens_per_second,
            network=needs.networks[name],
        )
        for name, machine in machines.items()
    }
    summary = RunPlan(
        params=fragments.total,
        pacing_step_seconds=needs.pacing_step_seconds,
        cycle_seconds=needs.cycle_seconds,
        tokens_per_second=rate,
        goodput=goodput,
        tokens_per_day=merged_per_day,
        days=run.total_tokens / merged_per_day if merged_per_day else None,
        coordinator=needs.coordinator,
        restart_seconds=needs.restart_seconds,
        refusals=refusals(terms),
        mending=mending(terms),
        rates=terms.rates,
        price_per_hour=price_per_hour(config, prices) if prices else None,
    )
    return Plan(
        config=path,
        fits=all(i.fits for i in compiled.values()) and not summary.refusals,
        islands=islands,
        run=summary,
        versions=versions,
    )
