"""Expected goodput of the planned islands, from the simulator of `diloco simulate`.

Interruptions of a few hundred chips are rare: to see enough of them would take months
of simulated steps. So the simulator measures two costs, each over a few hundred steps:
the differences between islands alone, and one interruption of each island. An island
whose interruptions come every `mtti` seconds and cost it `loss` seconds of work keeps
mtti / (mtti + loss) of its undisturbed work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from diloco_jax.config import SyncConfig
from diloco_jax.observability import measures
from diloco_jax.observability.measures import IslandMeasure
from diloco_jax.planning.options import Assumptions
from diloco_jax.protocol.coordinator import schedule
from diloco_jax.protocol.values import lead_of
from diloco_jax.simulation.fleets.failures import FailureModel, Segment, undisturbed
from diloco_jax.simulation.fleets.fleet import (
    TIME_BUDGET_STEPS,
    ExchangeTerms,
    VirtualFleet,
)
from diloco_jax.simulation.virtual.steps import durations

CYCLES, STEPS = 6, 300
"""Simulated cycles or steps of the slowest island, whichever takes longer."""
LATENCY_S = ExchangeTerms.latency_seconds
"""Seconds of latency of a link, one way."""
OUTAGE_STEPS = 50
"""Length of a simulated outage; the rest of a real outage counts as lost in full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedIsland:
    """An island as the simulator sees it."""

    chips: int
    tokens_per_step: int
    step_seconds: float
    hosts: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second without interruptions."""
        return self.tokens_per_step / self.step_seconds


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


def expected_goodput(
    sync: SyncConfig,
    params: int,
    machines: dict[str, SimulatedIsland],
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
    machines: dict[str, SimulatedIsland],
    outages: dict[str, tuple[float, float]],
    horizon: float,
    spread: float,
) -> tuple[dict[str, IslandMeasure], float]:
    """Return measures by island, and the participation. outages: (start, seconds)."""
    pace = schedule.pace(sync.quorum, [m.step_seconds for m in machines.values()])
    # The fleet's time budget is a number of steps, and must cover several round trips.
    pace = max(pace, 20 * LATENCY_S / TIME_BUDGET_STEPS)
    fleet = VirtualFleet(exchange, sync, pace)
    # The same step times with and without outages.
    rngs = np.random.default_rng(0).spawn(len(machines))
    for (name, machine), rng in zip(machines.items(), rngs, strict=True):
        life = _interrupted(*outages[name]) if name in outages else undisturbed()
        steps = durations(machine.step_seconds, spread, rng)
        lead = lead_of(machine.hosts)
        fleet.join(name, machine.step_seconds, steps, life, lead)
    fleet.begin()
    fleet.run(horizon)
    fleet.end()
    # The fleet gives every island the same number of tokens per step.
    scaled = {
        name: _scaled(measure, machine.tokens_per_step / measure.tokens_per_step)
        for (name, machine), measure in zip(
            machines.items(), fleet.measures(), strict=True
        )
    }
    return scaled, fleet.participation()


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
