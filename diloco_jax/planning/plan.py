"""The plan of a run, put together from its islands: compiled ones, or arithmetic.

Without a compiler a step is its FLOPs by the formula over the chips' peak rate. So it
is shorter than any real one, and loads links and coordinator the most. Of HBM only what
islands hold between steps is known: what holds with it may not fit all the same.

Checks go by this bound, or by the upper share of peak that the user knows. Days, tokens
and price go by the step that was measured, or by the share of peak that is expected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from diloco_jax.config import Config, ConfigError
from diloco_jax.config.resolving import resolve_open
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.hardware.machines import (
    NOTHING_MEASURED,
    MachineRates,
    Measurements,
)
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.flops import sequence_flops
from diloco_jax.planning.advice import LinkSetting, advise, mended, settings_that_fit
from diloco_jax.planning.checks import (
    LINK_UTILISATION,
    IslandNetwork,
    Needs,
    Remedy,
    least_hbm_of,
    needs_of,
    notes,
    refusals,
)
from diloco_jax.planning.compiling import IslandPlan
from diloco_jax.planning.coordinator import CoordinatorPlan, OutagePlan
from diloco_jax.planning.options import Assumptions, away, price_per_hour
from diloco_jax.planning.terms import Terms, one_of_each, terms_of

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
    """Seconds of a step at least: by the roofline, with its share of
    `exchange_seconds`, at peak rates, or at the upper share of peak; or of the emulated
    step if that is longer."""
    expected_step_seconds: float
    """Seconds of a step as it was measured, or at the expected share of peak."""
    expected_from: str
    """Where that is from."""
    least_hbm_bytes: int | None
    """Bytes of each device's HBM that are taken between steps, if nothing else is known
    of it; None if `compiled` has more."""
    hbm_bytes: float | None
    """What a device has for them."""
    exchange_seconds: float
    """Seconds of a cycle in which takes and adoptions hold up the steps: arithmetic
    from the collectives and the traffic of their compiled programs."""
    tokens_per_second: float
    """Tokens per second at best, without interruptions."""
    network: IslandNetwork
    """By the shortest step."""

    @property
    def expected_tokens_per_second(self) -> float:
        """Tokens per second by the expected step, without interruptions."""
        return self.tokens_per_step / self.expected_step_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """What a run costs by the prices of its user and the expected steps."""

    per_hour: dict[str, float]
    """Its parts."""
    per_day: float
    per_1e9_tokens: float | None
    """Of merged tokens; None if nothing is ever merged."""
    crossing_gb_per_day: float
    """GB that cross from region to region in a day."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstStart:
    """Seconds until a new run makes its first step, by what takes them."""

    draw_seconds: float
    """Of all cores that draw the parameters, or the most that a worker has; of one core
    if the model is of the user's own; 0 where they are not drawn."""
    write_seconds: float
    """Of the disk, or of the worker's that has most, which has every fragment's first
    snapshot before islands come."""
    fetch_seconds: float
    """Of the slowest link, which carries the anchors once, or of what the coordinator
    sends, which all islands fetch together."""
    compile_seconds: float | None
    """Of the slowest island's host; None if nobody measured it."""

    @property
    def seconds(self) -> float:
        """Until the first step: islands compile while they fetch. Without the
        compilation if nobody measured it."""
        before = self.draw_seconds + self.write_seconds
        return before + max(self.fetch_seconds, self.compile_seconds or 0.0)

    @property
    def line(self) -> str:
        """A line for people."""
        compiling = "compile, for how long nobody measured"
        if self.compile_seconds is not None:
            compiling = f"compile for {self.compile_seconds:.0f}"
        return (
            f"first start: parameters are drawn in {self.draw_seconds:.0f} s and "
            f"written in {self.write_seconds:.0f}; islands fetch them in "
            f"{self.fetch_seconds:.0f} and, beside it, {compiling}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Plan of all islands together."""

    params: int
    bound: str
    """The speed of the next three fields, and by which checks refuse, in words."""
    pacing_step_seconds: float
    cycle_seconds: float
    tokens_per_second: float
    """Tokens per second of all islands, without interruptions."""
    expected_cycle_seconds: float
    """By the expected steps, as all that follows up to the price."""
    expected_tokens_per_second: float
    goodput: ExpectedGoodput
    tokens_per_day: float
    """Tokens merged per day at the expected goodput."""
    days: float | None
    """Days to the config's total tokens; None if nothing is ever merged."""
    price: Price | None
    """By the prices of `--price`; None without them."""
    coordinator: CoordinatorPlan
    """By the shortest steps, as all that follows."""
    outage: OutagePlan
    first_start: FirstStart
    refusals: list[Remedy]
    mended: Remedy | None
    """One set of changes with which no check refuses; None if none does now, or if no
    set was found."""
    notes: list[str]
    """Needs that make somebody wait his turn, and refuse nothing."""
    settings: list[LinkSetting]
    """Settings of the exchange that the links carry, those with the fewest bytes
    first."""
    rates: MachineRates
    measured: Measurements


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Plan of all islands and of the run."""

    config: str
    fits: bool | None
    """True if every compiled island fits, and no check refuses. None if none does, and
    nothing was compiled: nobody knows what gradients and activations take."""
    versions: dict[str, str]
    """Versions of the packages that compiled; empty if nothing was compiled."""
    islands: dict[str, PlannedIsland]
    run: RunPlan
    advice: list[Remedy]
    """Single changes, each by itself."""

    def __repr__(self) -> str:
        days = "no end" if self.run.days is None else f"{self.run.days:.3g} days"
        refused = ", ".join(refusal.check for refusal in self.run.refusals)
        said = {True: "fits", False: "does not fit", None: "may fit"}[self.fits]
        return (
            f"<Plan of {self.config} on {', '.join(self.islands)}: {said}, "
            f"refused: {refused or 'none'}; "
            f"expected {self.run.tokens_per_day:.4g} tokens per day, {days}>"
        )

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
    measured: Measurements = NOTHING_MEASURED,
) -> Plan:
    """Plan the run. Raises ConfigError.

    compiled: the islands by name; None: by arithmetic. versions: of the packages that
    compiled. prices: complete by `require_prices`.
    """
    config = resolve_open(config)
    made, names = dict(compiled or {}), tuple(config.islands)
    for name in made.keys() & measured.device_memory_bytes.keys():
        made[name] = made[name].with_memory(measured.device_memory_bytes[name].value)
    expected = {
        name: expected_step(config, name, assumptions, measured, made.get(name))
        for name in names
    }
    upper = assumptions.upper_share
    seconds = {
        # What was measured is possible, whatever bound was given.
        name: min(
            expected[name][0], step_seconds_of(config, name, made.get(name), upper)
        )
        for name in names
    }
    terms = terms_of(config, fragments, seconds, assumptions.link_gbit_per_s, measured)
    terms = dataclasses.replace(terms, hbm_known=bool(made))
    needs, run, hbm = needs_of(terms), terms.config.run, least_hbm_of(terms)
    slices = {n: slice_of(n, island) for n, island in config.islands.items()}
    tokens = {
        name: island.batch_size * run.sequence_length
        for name, island in config.islands.items()
    }
    islands = {
        name: PlannedIsland(
            compiled=made.get(name),
            chips=found.chips,
            hosts=found.hosts,
            tokens_per_step=tokens[name],
            step_seconds=terms.step_seconds[name],
            expected_step_seconds=expected[name][0],
            expected_from=expected[name][1],
            least_hbm_bytes=hbm[name][0] if hbm else None,
            hbm_bytes=hbm[name][1] if hbm else None,
            exchange_seconds=made[name].exchange_seconds if made else 0.0,
            tokens_per_second=tokens[name] / terms.step_seconds[name],
            network=needs.networks[name],
        )
        for name, found in slices.items()
    }
    then = dataclasses.replace(
        terms, step_seconds={n: s for n, (s, _) in expected.items()}
    )
    rate = sum(island.expected_tokens_per_second for island in islands.values())
    goodput = expected_goodput(config, islands, assumptions)
    per_day = rate * goodput.goodput * SECONDS_PER_DAY
    refused = refusals(terms)
    return Plan(
        config=path,
        fits=None
        if not (made or refused)
        else all(island.fits for island in made.values()) and not refused,
        versions=dict(versions or {}),
        islands=islands,
        run=RunPlan(
            params=fragments.total,
            bound=assumptions.bound,
            pacing_step_seconds=terms.pacing_step_seconds,
            cycle_seconds=terms.cycle_seconds,
            tokens_per_second=sum(i.tokens_per_second for i in islands.values()),
            expected_cycle_seconds=then.cycle_seconds,
            expected_tokens_per_second=rate,
            goodput=goodput,
            tokens_per_day=per_day,
            days=run.total_tokens / per_day if per_day else None,
            price=_price(config, prices, needs_of(then), per_day) if prices else None,
            coordinator=needs.coordinator,
            outage=needs.outage,
            first_start=_first_start(terms, needs, made),
            refusals=refused,
            mended=mended(terms) if refused else None,
            notes=notes(terms),
            settings=settings_that_fit(terms),
            rates=terms.rates,
            measured=measured,
        ),
        advice=advise(terms, made),
    )


def _price(
    config: Config, prices: Mapping[str, float], expected: Needs, tokens_per_day: float
) -> Price:
    """Return the price of a run. prices: `require_prices` misses none. expected: needs
    by the expected steps."""
    links, names = expected.networks, away(config)
    gbit_per_s = sum(links[name].up.mean for name in names)
    gbit_per_s += sum(links[n].down.mean for n in one_of_each(config, names))
    gbit_per_s *= LINK_UTILISATION
    per_hour = price_per_hour(config, prices, gbit_per_s / 8 * 3600)
    per_day = 24 * sum(per_hour.values())
    return Price(
        per_hour=per_hour,
        per_day=per_day,
        per_1e9_tokens=per_day / tokens_per_day * 1e9 if tokens_per_day else None,
        crossing_gb_per_day=gbit_per_s / 8 * SECONDS_PER_DAY,
    )


def _first_start(
    terms: Terms, needs: Needs, compiled: Mapping[str, IslandPlan]
) -> FirstStart:
    """Return the first start. Without a measurement on a host, islands count as long as
    this machine compiled for them."""
    run, total, found = terms.config.run, terms.fragments.total, terms.measured
    here = [i.compile_seconds for i in compiled.values() if i.compile_seconds]
    told, longest = found.compile_seconds, max(here, default=None)
    drawn = not (run.model.weights or terms.config.placement.first_from)
    # Workers draw together, each its own part.
    core_seconds = terms.rates.draw_core_seconds * total / 1e9
    share = needs.coordinator.share_served / terms.machine.cores
    return FirstStart(
        draw_seconds=drawn * core_seconds * (1.0 if run.model.factory else share),
        write_seconds=needs.coordinator.share_served
        * terms.sizes.state
        / terms.disk_bytes_per_s,
        fetch_seconds=needs.together_seconds,
        compile_seconds=told.value if told else longest,
    )


def step_seconds_of(
    config: Config, name: str, compiled: IslandPlan | None = None, share: float = 1.0
) -> float:
    """Return the seconds of an island's step, in which the model's FLOPs reach at most
    this share of the chips' peak: see `PlannedIsland.step_seconds`."""
    island, run, found = (
        config.islands[name],
        config.run,
        slice_of(name, config.islands[name]),
    )
    if compiled:
        at_share = compiled.flops.model / (share * found.flops_per_s)
        exchange = compiled.exchange_seconds / run.sync.cycle
        bound = compiled.roofline.step_seconds + exchange
        return max(bound, at_share, island.step_seconds)
    if run.model.factory:
        raise ConfigError(
            f"arithmetic: there is no formula for the FLOPs of model.factory = "
            f"{run.model.factory!r}; plan without --arithmetic"
        )
    flops = island.batch_size * sequence_flops(run)
    again = RECOMPUTED if island.remat == "full" else 1.0
    return max(flops * max(again, 1 / share) / found.flops_per_s, island.step_seconds)


def expected_step(
    config: Config,
    name: str,
    assumptions: Assumptions,
    measured: Measurements,
    compiled: IslandPlan | None = None,
) -> tuple[float, str]:
    """Return the seconds that an island's step is expected to take, and where that is
    from: a measured step, a measured or expected share of peak, or what bounds it."""
    island = config.islands[name]
    if step := measured.step_seconds.get(name):
        return max(step.value, island.step_seconds), "measured"
    found = measured.share_of_peak.get(slice_of(name, island).generation.name)
    share = found.value if found else assumptions.expected_share
    where = f"at {share:.3g} of peak{', measured' if found else ''}"
    seconds = step_seconds_of(config, name, compiled, share)
    if seconds == island.step_seconds:
        where = f"islands.{name}.step_seconds"
    elif compiled and seconds == step_seconds_of(config, name, compiled, math.inf):
        where = f"at best, bound by {compiled.roofline.binding}"
    return seconds, where


def expected_goodput(
    config: Config,
    islands: Mapping[str, PlannedIsland],
    assumptions: Assumptions,
) -> ExpectedGoodput:
    """Return the share of the tokens that is merged if islands are interrupted.

    An island that is interrupted every `mtti` seconds, and then loses `lost` seconds of
    work, keeps mtti / (mtti + lost) of it. Lost are the time until it is back, the
    fetch of the parameters, and what its fragments computed since their last takes:
    half a cycle of its steps. Steps are the expected ones.
    """
    lost, between, kept = {}, {}, 0.0
    for name, island in islands.items():
        unsent = config.run.sync.cycle * island.expected_step_seconds / 2
        back = assumptions.return_minutes * 60 + island.network.join_seconds
        lost[name] = back + unsent
        years = assumptions.mtbi_years
        rate = island.chips / (years * SECONDS_PER_YEAR) if years else 0.0
        between[name] = 1 / rate / 3600 if rate else None
        kept += island.expected_tokens_per_second / (1 + rate * lost[name])
    possible = sum(island.expected_tokens_per_second for island in islands.values())
    return ExpectedGoodput(
        goodput=kept / possible,
        lost_seconds=lost,
        mean_hours_between=between,
        assumptions=assumptions,
    )
