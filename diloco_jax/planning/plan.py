"""The plan of a run, put together from its islands: compiled ones, or arithmetic.

Without a compiler a step is its FLOPs by the formula over the chips' peak rate. So it
is shorter than any real one, and loads links and coordinator the most. Nothing is known
about HBM: a model that does not fit its slice is not found.

Expected goodput comes from the simulator of `diloco simulate`. Interruptions of a few
hundred chips are rare: to see enough of them would take months of simulated steps. So
the simulator measures two costs, each over a few hundred steps: the differences between
islands alone, and one interruption of each island. An island whose interruptions come
every `mtti` seconds and cost it `loss` seconds of work keeps mtti / (mtti + loss) of
its undisturbed work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from diloco_jax.config import Config, ConfigError, SyncConfig
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.hardware.machines import MachineRates
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.flops import analytic_flops
from diloco_jax.observability import measures
from diloco_jax.observability.measures import IslandMeasure
from diloco_jax.planning.checks import (
    Change,
    IslandNetwork,
    Remedy,
    Terms,
    mending,
    needs_of,
    refusals,
)
from diloco_jax.planning.compiling import IslandPlan
from diloco_jax.planning.coordinator import CoordinatorPlan
from diloco_jax.planning.options import Assumptions, price_per_hour
from diloco_jax.protocol.coordinator import schedule
from diloco_jax.protocol.values import lead_of
from diloco_jax.simulation.clock import durations
from diloco_jax.simulation.fleet import (
    TIME_BUDGET_STEPS,
    ExchangeTerms,
    FailureModel,
    FleetIsland,
    Segment,
    run_fleet,
    undisturbed,
)

RECOMPUTED = 4 / 3
"""Executed FLOPs over those of the model, where a layer is computed again."""
SECONDS_PER_DAY = 86400
CYCLES, STEPS = 6, 300
"""Simulated cycles or steps of the slowest island, whichever takes longer."""
LATENCY_S = ExchangeTerms.latency_seconds
"""Seconds of latency of a link, one way."""
OUTAGE_STEPS = 50
"""Length of a simulated outage; the rest of a real outage counts as lost in full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedGoodput:
    """Shares of the tokens that undisturbed islands would compute."""

    goodput: float
    undisturbed: float
    """Goodput without interruptions."""
    participation: float
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
    restart_seconds: float
    """Seconds from the death of the coordinator's process to its service."""
    refusals: list[Remedy]
    mending: Change
    """One set of changes after which no check refuses; empty: none is known, or
    needed."""
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
    advice: tuple[Remedy, ...] = ()
    """Changes that were tried, each by itself."""

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
    """Plan the run, without advice. Raises ConfigError.

    compiled: the islands by name; None: by arithmetic. versions: of the packages that
    compiled. prices: see `price_per_hour`.
    """
    resolved, made = resolve_outer(config), compiled or {}
    run, slices = resolved.run, {n: slice_of(n, i) for n, i in config.islands.items()}
    terms = Terms(
        config=resolved,
        fragments=fragments,
        hosts={name: found.hosts for name, found in slices.items()},
        step_seconds={n: _step_seconds(config, n, made.get(n)) for n in slices},
        link_gbit_per_s=assumptions.link_gbit_per_s,
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
        goodput = expected_goodput(
            run.sync,
            fragments.total,
            islands,
            merge_seconds=needs.coordinator.merges.fragment_core_seconds,
            assumptions=assumptions,
        )
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
            restart_seconds=needs.restart_seconds,
            refusals=refused,
            mending=mending(terms),
            rates=terms.rates,
            price_per_hour=price_per_hour(config, prices) if prices else None,
        ),
    )


def _step_seconds(config: Config, name: str, compiled: IslandPlan | None) -> float:
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
    flops = island.batch_size * analytic_flops(run.model, run.sequence_length)
    again = RECOMPUTED if island.remat == "full" else 1.0
    seconds = flops * again / (found.chips * found.generation.flops_per_s)
    return max(seconds, island.step_seconds)


def expected_goodput(
    sync: SyncConfig,
    params: int,
    machines: Mapping[str, PlannedIsland],
    merge_seconds: float,
    assumptions: Assumptions,
) -> ExpectedGoodput:
    """Simulate the islands and return the goodput to expect.

    merge_seconds: seconds from the last delta of a merge to its publish.
    """
    assumptions.validate()
    exchange = ExchangeTerms(
        cycle=sync.steps_per_cycle,
        fragments=sync.fragments,
        overlap=sync.overlap_steps,
        codec=sync.codec_up,
        params=params,
        link_gbit_per_s=assumptions.link_gbit_per_s,
        merge_seconds=merge_seconds,
        join_seconds=0.0,
    )
    longest = max(machine.step_seconds for machine in machines.values())
    horizon = max(STEPS, CYCLES * sync.steps_per_cycle) * longest
    outages = {
        name: ((i + 1) / (len(machines) + 1) * horizon, OUTAGE_STEPS * m.step_seconds)
        for i, (name, m) in enumerate(machines.items())
    }
    smooth, participation = _simulate(
        exchange, sync, machines, {}, horizon, assumptions.step_spread
    )
    broken, _ = _simulate(
        exchange, sync, machines, outages, horizon, assumptions.step_spread
    )
    lost, between, kept = {}, {}, 0.0
    for name, machine in machines.items():
        tokens = smooth[name].merged_tokens - broken[name].merged_tokens
        beyond = assumptions.return_minutes * 60 - outages[name][1]
        lost[name] = max(0.0, tokens / machine.tokens_per_second + beyond)
        rate = (
            machine.chips
            * FailureModel(
                mtbi_years=assumptions.mtbi_years
            ).interruptions_per_chip_second
        )
        between[name] = 1 / rate / 3600 if rate else None
        merged = smooth[name].merged_tokens / smooth[name].provisioned_seconds
        kept += merged / (1 + rate * lost[name])
    possible = sum(machine.tokens_per_second for machine in machines.values())
    return ExpectedGoodput(
        goodput=kept / possible,
        undisturbed=measures.goodput(list(smooth.values())),
        participation=participation,
        lost_seconds=lost,
        mean_hours_between=between,
        assumptions=assumptions,
    )


def _simulate(
    exchange: ExchangeTerms,
    sync: SyncConfig,
    machines: Mapping[str, PlannedIsland],
    outages: dict[str, tuple[float, float]],
    horizon: float,
    spread: float,
) -> tuple[dict[str, IslandMeasure], float]:
    """Return measures by island, and the participation. outages: (start, seconds)."""
    pace = schedule.pace(sync.quorum, [m.step_seconds for m in machines.values()])
    # The fleet's time budget is a number of steps, and must cover several round trips.
    pace = max(pace, 20 * LATENCY_S / TIME_BUDGET_STEPS)
    # The same step times with and without outages.
    rngs, islands = np.random.default_rng(0).spawn(len(machines)), {}
    for (name, machine), rng in zip(machines.items(), rngs, strict=True):
        life = _interrupted(*outages[name]) if name in outages else undisturbed()
        steps = durations(machine.step_seconds, spread, rng)
        lead = lead_of(machine.hosts)
        islands[name] = FleetIsland(machine.step_seconds, steps, life, lead)
    fleet = run_fleet(exchange, sync, pace, islands, horizon)
    # The fleet gives every island the same number of tokens per step.
    scaled = {
        name: _scaled(measure, machines[name].tokens_per_step / measure.tokens_per_step)
        for name, measure in fleet.islands.items()
    }
    return scaled, fleet.participation


def _interrupted(start: float, seconds: float) -> Iterator[Segment]:
    """Return the life of an island that loses all its chips once."""
    yield Segment(0.0, start, 1.0)
    yield Segment(start, start + seconds, 0.0, lost=True)
    yield Segment(start + seconds, math.inf, 1.0)


def _scaled(measure: IslandMeasure, factor: float) -> IslandMeasure:
    names = ("tokens_per_step", "computed_tokens", "merged_tokens")
    return dataclasses.replace(
        measure, **{name: round(getattr(measure, name) * factor) for name in names}
    )
