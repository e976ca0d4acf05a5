"""`diloco simulate mix`: islands of two generations under three ways to wait.

The published setting (arXiv 2604.21428): 4 islands v6e and 4 v5p, 18 % apart in speed,
10 % spread. Published goodput: 84 % waiting for all, 100 % with K = 1, with grace and
without.

In this product K = M does not make islands wait: ticks come when the slowest island has
done its steps, and the others go on meanwhile. The published 84 % counts the cost of a
step that waits for every island, which is the row "lockstep".
"""

from __future__ import annotations

import dataclasses

import numpy as np

from diloco_jax.config import ConfigError, SyncConfig
from diloco_jax.config.fields import (
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check_bounds,
    setting,
)
from diloco_jax.observability import measures
from diloco_jax.simulation.fleets.checks import (
    STEP_SECONDS,
    deltas_in_reach,
    islands_in_reach,
    steps_in_reach,
)
from diloco_jax.simulation.fleets.failures import undisturbed
from diloco_jax.simulation.fleets.fleet import ExchangeTerms, VirtualFleet
from diloco_jax.simulation.output import Progress, nobody, part
from diloco_jax.simulation.virtual.island import durations, lockstep_share

PUBLISHED_GOODPUT = {"lockstep": 0.84, "K = 1": 1.0, "K = 1 with grace": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixConfig:
    """Fast and slow islands, all with the same batch.

    The defaults of islands, gap and spread are the published setting.
    """

    v6e: int = setting(4, NOT_NEGATIVE, help="Faster islands.")
    v5p: int = setting(4, NOT_NEGATIVE, help="Slower islands.")
    gap: float = setting(
        0.18,
        NOT_NEGATIVE,
        help="How much longer a slow island's step is, as a share of a fast one's.",
    )
    step_spread: float = setting(
        0.10, SHARE, help="Standard deviation of every step's time over its mean."
    )
    step_seconds: float = setting(
        10.0, STEP_SECONDS, help="Seconds of a fast island's step."
    )
    grace: float = setting(
        SyncConfig.grace, BELOW_1, help="gamma of the row with grace."
    )
    hours: float = setting(6.0, POSITIVE, help="Simulated hours.")
    seed: int = setting(0, NOT_NEGATIVE, help="Seed of the step times.")
    exchange: ExchangeTerms = dataclasses.field(default_factory=ExchangeTerms)

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        if self.v6e + self.v5p < 2:
            raise ConfigError(
                f"v6e = {self.v6e} and v5p = {self.v5p} islands; a mix has at least 2"
            )
        if self.hours * 3600 < self.step_seconds * (1 + self.gap):
            enough = self.hours * 3600 >= self.step_seconds
            remedy = "lower gap, or raise hours" if enough else "raise hours"
            raise ConfigError(
                f"hours = {self.hours:g} is less than a step of step_seconds = "
                f"{self.step_seconds:g} with gap = {self.gap:g}; {remedy}"
            )
        islands_in_reach(self.v6e + self.v5p, "v6e or v5p")
        length = (self.hours, self.step_seconds, self.v6e + self.v5p)
        steps_in_reach(*length)
        self.exchange.validate()
        deltas_in_reach(*length, self.exchange)

    def mean_step_seconds(self) -> dict[str, float]:
        """Return the mean seconds of a step, by island."""
        fast = {f"v6e-{i}": self.step_seconds for i in range(self.v6e)}
        slow = self.step_seconds * (1 + self.gap)
        return fast | {f"v5p-{i}": slow for i in range(self.v5p)}

    def published_goodput(self, way: str) -> float | None:
        """Return the published goodput of one way to wait in this setting, or None."""
        setting = (self.v6e, self.v5p, self.gap, self.step_spread)
        usual = (MixConfig.v6e, MixConfig.v5p, MixConfig.gap, MixConfig.step_spread)
        return PUBLISHED_GOODPUT.get(way) if setting == usual else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixRow:
    """One way to wait; all fields but `merges_per_hour` are shares."""

    name: str
    goodput: float
    compute_goodput: float
    participation: float
    merges_per_hour: float
    """Merges per hour of all fragments."""
    published_goodput: float | None
    """Published goodput, in the published setting only."""


def simulate_mix(config: MixConfig, progress: Progress = nobody) -> tuple[MixRow, ...]:
    """Simulate every way to wait. Raises ConfigError."""
    config.validate()
    everyone = config.v6e + config.v5p
    ways = (
        ("K = M", everyone, config.grace),
        ("K = 1", 1, 0.0),
        ("K = 1 with grace", 1, config.grace),
    )
    rows = [_lockstep(config)]
    for i, (name, quorum, grace) in enumerate(ways):
        share_done = part(progress, i, len(ways))
        rows.append(_decoupled(config, name, quorum, grace, share_done))
    return tuple(rows)


def _lockstep(config: MixConfig) -> MixRow:
    means = config.mean_step_seconds()
    rng = np.random.default_rng(config.seed)
    share = lockstep_share(list(means.values()), config.step_spread, rng)
    # An island computes for that share of its time: all islands make as many steps.
    step_seconds = sum(means.values()) / len(means) / share
    return MixRow(
        name="lockstep",
        goodput=share,
        compute_goodput=share,
        participation=1.0,
        merges_per_hour=3600 / step_seconds,
        published_goodput=config.published_goodput("lockstep"),
    )


def _decoupled(
    config: MixConfig,
    name: str,
    quorum: int,
    grace: float,
    progress: Progress,
) -> MixRow:
    sync = config.exchange.sync(quorum, grace)
    fleet = VirtualFleet(config.exchange, sync, config.step_seconds)
    means = config.mean_step_seconds()
    rngs = np.random.default_rng(config.seed).spawn(len(means))
    for (island, mean), rng in zip(means.items(), rngs, strict=True):
        steps = durations(mean, config.step_spread, rng)
        fleet.join(island, mean, steps, undisturbed())
    fleet.begin()
    fleet.run(config.hours * 3600, progress)
    fleet.end()
    return MixRow(
        name=name,
        goodput=measures.goodput(fleet.measures()),
        compute_goodput=measures.compute_goodput(fleet.measures()),
        participation=fleet.participation(),
        merges_per_hour=fleet.merges / config.hours,
        published_goodput=config.published_goodput(name),
    )
