"""A plan without a compiler: arithmetic from published peak rates.

The step is its FLOPs by the formula over the chips' peak rate. So it is shorter than
any real one, and loads links and coordinator the most. Nothing is known about
HBM: a model that does not fit its slice is not found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from diloco_jax.config import Config, ConfigError
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.hardware.chips import chip_of
from diloco_jax.hardware.rates import MachineRates
from diloco_jax.hardware.slices import slice_of
from diloco_jax.models.flops import analytic_flops
from diloco_jax.planning.changes import Change
from diloco_jax.planning.checks import Shortfall, mending, refusals
from diloco_jax.planning.evenness import to_even
from diloco_jax.planning.price import price_per_hour
from diloco_jax.planning.results import Advice
from diloco_jax.planning.terms import Needs, Terms, needs_of

RECOMPUTED = 4 / 3
"""Executed FLOPs over those of the model, where a layer is computed again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArithmeticPlan:
    """Needs of a run of which nothing was compiled."""

    config: str
    arithmetic: bool
    """Always true: sets this plan apart from one of compiled islands."""
    fits: bool
    """True if no check refuses; HBM is not checked."""
    params: int
    step_seconds: dict[str, float]
    needs: Needs
    refusals: list[Shortfall]
    mending: Change
    """One set of changes after which no check refuses; empty: none is known, or
    needed."""
    rates: MachineRates
    price_per_hour: dict[str, float] | None
    advice: list[Advice]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as Python builtins."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def plan_by_arithmetic(
    path: str,
    config: Config,
    fragments: FragmentPlan,
    link_gbit_per_s: float,
    prices: Mapping[str, float],
) -> ArithmeticPlan:
    """Plan the run from formulas. Raises ConfigError."""
    steps, hosts = {}, {}
    for name, island in config.islands.items():
        if config.run.model.factory:
            raise ConfigError(
                f"arithmetic: there is no formula for the FLOPs of model.factory = "
                f"{config.run.model.factory!r}; plan without --arithmetic"
            )
        found = slice_of(name, island)
        flops = analytic_flops(config.run.model, config.run.sequence_length)
        again = RECOMPUTED if island.remat == "full" else 1.0
        rate = found.chips * chip_of(found).flops_per_s
        seconds = island.batch_size * flops * again / rate
        steps[name], hosts[name] = max(seconds, island.step_seconds), found.hosts

    def terms_of(config: Config, fragments: FragmentPlan) -> Terms:
        return Terms(
            config=resolve_outer(config),
            fragments=fragments,
            hosts=hosts,
            step_seconds=steps,
            link_gbit_per_s=link_gbit_per_s,
        )

    terms = terms_of(config, fragments)
    found_refusals = refusals(terms)
    refused = {refusal.check for refusal in found_refusals}

    def is_no_worse(change: Change, then: Config, cut: FragmentPlan) -> bool:
        return {r.check for r in refusals(terms_of(then, cut))} <= refused

    return ArithmeticPlan(
        config=path,
        arithmetic=True,
        fits=not found_refusals,
        params=fragments.total,
        step_seconds=steps,
        needs=needs_of(terms),
        refusals=found_refusals,
        mending=mending(terms),
        rates=terms.rates,
        price_per_hour=price_per_hour(config, prices) if prices else None,
        advice=list(to_even(config, fragments, is_no_worse)),
    )
