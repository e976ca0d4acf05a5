"""The plan of a run, put together from its islands: compiled ones, or arithmetic.

Without a compiler a step is its FLOPs by the formula over the chips' peak rate. So it
is shorter than any real one, and loads links and coordinator the most. Nothing is known
about HBM: a model that does not fit its slice is not found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from diloco_jax.config import Config, ConfigError
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.hardware.machines import MachineRates
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.flops import sequence_flops
from diloco_jax.planning.advice import advise
from diloco_jax.planning.checks import IslandNetwork, Remedy, Terms, needs_of, refusals
from diloco_jax.planning.compiling import IslandPlan
from diloco_jax.planning.coordinator import CoordinatorPlan, OutagePlan
from diloco_jax.planning.options import Assumptions, price_per_hour

RECOMPUTED = 4 / 3
"""Executed FLOPs over those of the model, where a layer is computed again."""
SECONDS_PER_DAY = 86400
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedGoodput:
    """Share of the tokens that islands without interruptions would compute."""

    goodput: float
    lost_seconds: dict[str, float]
    """Seconds of work that one interruption costs, by island."""
    mean_hours_between: dict[str, float | None]
    """Mean hours between interruptions, by island; None if there are none."""
    assumptions: Assumptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedIsland:
    """Plan of one island among the others."""

    compiled: IslandPlan | None
    """None if the plan is arithmetic alone."""
    chips: int
    hosts: int
    tokens_per_step: int
    step_seconds: float
    """Seconds of a step by the roofline, with its share of `exchange_seconds`, or at
    peak rates; or of the emulated step if that is longer."""
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
    goodput: ExpectedGoodput | None
    """None if the plan is arithmetic alone, and so are the next two."""
    tokens_per_day: float | None
    """Tokens merged per day at the expected goodput."""
    days: float | None
    """Days to the config's total tokens; None too if nothing is ever merged."""
    coordinator: CoordinatorPlan
    outage: OutagePlan
    refusals: list[Remedy]
    rates: MachineRates
    price_per_hour: dict[str, float] | None
    """Its parts, by the prices of `--price`; None without them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of all islands and of the run."""

    config: str
    fits: bool
    """True if every compiled island fits, and no check refuses."""
    versions: dict[str, str]
    """Versions of the packages that compiled; empty if nothing was compiled."""
    islands: dict[str, PlannedIsland]
    run: RunPlan
    advice: list[Remedy]
    """Single changes, each by itself."""

    @property
    def compiled(self) -> dict[str, IslandPlan]:
        """The compiled islands by name; empty if the plan is arithmetic alone."""
        return {n: i.compiled for n, i in self.islands.items() if i.compiled}

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
    fragments: FragmentPlan,
    assumptions: Assumptions,
    compiled: Mapping[str, IslandPlan] | None = None,
    versions: Mapping[str, str] | None = None,
    prices: Mapping[str, float] | None = None,
) -> Plan:
    """Plan the run. Raises ConfigError.

    compiled: the islands by name; None: by arithmetic. versions: of the packages that
    compiled. prices: see `price_per_hour`.
    """
    made = compiled or {}
    seconds = {n: step_seconds_of(config, n, made.get(n)) for n in config.islands}
    terms = terms_of(config, fragments, seconds, assumptions.link_gbit_per_s)
    run, slices = (
        terms.config.run,
        {n: slice_of(n, i) for n, i in config.islands.items()},
    )
    needs, length = needs_of(terms), run.sequence_length
    tokens = {
        name: made[name].tokens_per_step if made else island.batch_size * length
        for name, island in config.islands.items()
    }
    islands = {
        name: PlannedIsland(
            compiled=made.get(name),
            chips=found.chips,
            hosts=found.hosts,
            tokens_per_step=tokens[name],
            step_seconds=terms.step_seconds[name],
            exchange_seconds=made[name].exchange_seconds if made else 0.0,
            tokens_per_second=tokens[name] / terms.step_seconds[name],
            network=needs.networks[name],
        )
        for name, found in slices.items()
    }
    rate = sum(island.tokens_per_second for island in islands.values())
    goodput = tokens_per_day = None
    if made:
        goodput = expected_goodput(config, islands, assumptions)
        tokens_per_day = rate * goodput.goodput * SECONDS_PER_DAY
    refused = refusals(terms)
    return Plan(
        config=path,
        fits=all(island.fits for island in made.values()) and not refused,
        versions=dict(versions or {}),
        islands=islands,
        run=RunPlan(
            params=fragments.total,
            pacing_step_seconds=needs.pacing_step_seconds,
            cycle_seconds=needs.cycle_seconds,
            tokens_per_second=rate,
            goodput=goodput,
            tokens_per_day=tokens_per_day,
            days=run.total_tokens / tokens_per_day if tokens_per_day else None,
            coordinator=needs.coordinator,
            outage=needs.outage,
            refusals=refused,
            rates=terms.rates,
            price_per_hour=price_per_hour(config, prices) if prices else None,
        ),
        advice=advise(terms, made),
    )


def terms_of(
    config: Config,
    fragments: FragmentPlan,
    step_seconds: Mapping[str, float],
    link_gbit_per_s: float = Assumptions.link_gbit_per_s,
) -> Terms:
    """Return the inputs of a plan whose islands' steps take so long."""
    return Terms(
        config=resolve_outer(config),
        fragments=fragments,
        hosts={n: slice_of(n, island).hosts for n, island in config.islands.items()},
        step_seconds=step_seconds,
        link_gbit_per_s=link_gbit_per_s,
    )


def step_seconds_of(
    config: Config, name: str, compiled: IslandPlan | None = None
) -> float:
    """Return the seconds of an island's step: see `PlannedIsland.step_seconds`."""
    island, run = config.islands[name], config.run
    if compiled:
        exchange = compiled.exchange_seconds / run.sync.steps_per_cycle
        return max(compiled.roofline.step_seconds + exchange, island.step_seconds)
    if run.model.factory:
        raise ConfigError(
            f"arithmetic: there is no formula for the FLOPs of model.factory = "
            f"{run.model.factory!r}; plan without --arithmetic"
        )
    found = slice_of(name, island)
    flops = island.batch_size * sequence_flops(run)
    again = RECOMPUTED if island.remat == "full" else 1.0
    seconds = flops * again / (found.chips * found.generation.flops_per_s)
    return max(seconds, island.step_seconds)


def expected_goodput(
    config: Config,
    islands: Mapping[str, PlannedIsland],
    assumptions: Assumptions,
) -> ExpectedGoodput:
    """Return the share of the tokens that is merged if islands are interrupted.

    An island that is interrupted every `mtti` seconds, and then loses `lost` seconds of
    work, keeps mtti / (mtti + lost) of it. Lost are the time until it is back, the
    fetch of the parameters, and what its fragments computed since their last takes:
    half a cycle of its steps.
    """
    assumptions.validate()
    lost, between, kept = {}, {}, 0.0
    for name, island in islands.items():
        unsent = config.run.sync.steps_per_cycle * island.step_seconds / 2
        back = assumptions.return_minutes * 60 + island.network.join_seconds
        lost[name] = back + unsent
        years = assumptions.mtbi_years
        rate = island.chips / (years * SECONDS_PER_YEAR) if years else 0.0
        between[name] = 1 / rate / 3600 if rate else None
        kept += island.tokens_per_second / (1 + rate * lost[name])
    possible = sum(island.tokens_per_second for island in islands.values())
    return ExpectedGoodput(
        goodput=kept / possible,
        lost_seconds=lost,
        mean_hours_between=between,
        assumptions=assumptions,
    )
