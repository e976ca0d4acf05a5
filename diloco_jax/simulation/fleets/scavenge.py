"""`diloco simulate scavenge`: extra islands for a part of the token budget.

The part lies in the middle of the budget: extra islands join when it begins and leave
when it ends. The published training times (arXiv 2604.21428), relative to the same run
without them, are for half of the budget. The same tokens at a speed higher by a share x
take at best 0.5 + 0.5 / (1 + x).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from diloco_jax.config import ConfigError, SyncConfig
from diloco_jax.config.fields import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check_bounds,
    setting,
)
from diloco_jax.simulation.fleets.checks import (
    STEP_SECONDS,
    deltas_in_reach,
    islands_in_reach,
    steps_in_reach,
)
from diloco_jax.simulation.fleets.failures import undisturbed
from diloco_jax.simulation.fleets.fleet import (
    TOKENS_PER_STEP,
    ExchangeTerms,
    VirtualFleet,
)
from diloco_jax.simulation.output import Progress, nobody, part
from diloco_jax.simulation.virtual.island import durations

PUBLISHED = {
    0.25: (0.90, 1.07),
    0.5: (0.83, 1.09),
    1.0: (0.75, 1.02),
    3.0: (0.62, 0.80),
}
"""Time ratios, decoupled and elastic data-parallel, by share of extra compute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScavengeConfig:
    """A run, and the islands that it gets on top."""

    islands: int = setting(8, AT_LEAST_1, help="Islands of the whole run.")
    extra: tuple[float, ...] = setting(
        tuple(PUBLISHED),
        help="Extra islands, as shares of those of the whole run; one simulation each.",
    )
    tokens_share: float = setting(
        0.5, help="Share of the token budget during which extra islands take part."
    )
    step_seconds: float = setting(10.0, STEP_SECONDS, help="Seconds of a step.")
    step_spread: float = setting(
        0.0, SHARE, help="Standard deviation of the step time over its mean."
    )
    quorum: int = setting(
        SyncConfig.quorum,
        AT_LEAST_1,
        help="K: deltas without which a fragment is not merged.",
    )
    grace: float = setting(
        SyncConfig.grace,
        BELOW_1,
        help="gamma: share of the slack spent on waiting for more than K deltas.",
    )
    hours: float = setting(
        6.0, POSITIVE, help="Simulated hours of the run without extra islands."
    )
    seed: int = setting(0, NOT_NEGATIVE, help="Seed of the step times.")
    exchange: ExchangeTerms = dataclasses.field(default_factory=ExchangeTerms)

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        if not 0 < self.tokens_share <= 1:
            raise ConfigError(
                f"tokens_share = {self.tokens_share}; choose a share above 0 and at "
                f"most 1"
            )
        if not self.extra:
            raise ConfigError("extra is empty; give shares of the islands, such as 0.5")
        if self.hours * 3600 < self.step_seconds:
            raise ConfigError(
                f"hours = {self.hours:g} is less than step_seconds = "
                f"{self.step_seconds:g}; raise hours"
            )
        islands_in_reach(self.islands, "islands")
        length = (self.hours, self.step_seconds, self.islands)
        steps_in_reach(*length)
        if self.quorum > self.islands:
            raise ConfigError(
                f"quorum = {self.quorum}, but islands = {self.islands}: without the "
                f"extra ones no fragment could merge; lower quorum or add islands"
            )
        for extra in self.extra:
            added = extra * self.islands
            if not (0 < added < math.inf and math.isclose(added, round(added))):
                raise ConfigError(
                    f"extra = {extra:g} of islands = {self.islands} is {added:g} "
                    f"islands; choose a share that gives a whole number of them"
                )
            islands_in_reach(self.islands + added, f"islands, or extra = {extra:g}")
        self.exchange.validate()
        deltas_in_reach(*length, self.exchange)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScavengeRow:
    """Result for one amount of extra compute."""

    extra: float
    """Extra islands as a share of the usual islands."""
    hours: float
    time_ratio: float
    """Training time over that without extra islands."""
    best_ratio: float
    """Time ratio if joining and leaving cost nothing."""
    published_ratio: float | None
    published_elastic_ratio: float | None
    """Published time ratio of elastic data-parallel training."""


def simulate_scavenge(
    config: ScavengeConfig, progress: Progress = nobody
) -> tuple[ScavengeRow, ...]:
    """Simulate the run with and without each amount of islands. Raises ConfigError."""
    config.validate()
    parts = 1 + len(config.extra)
    without_s = _training_seconds(config, 0.0)
    rows = []
    for i, extra in enumerate(config.extra):
        part(progress, i, parts)(1.0)
        seconds = _training_seconds(config, extra)
        published = PUBLISHED.get(extra) if config.tokens_share == 0.5 else None
        rows.append(
            ScavengeRow(
                extra=extra,
                hours=seconds / 3600,
                time_ratio=seconds / without_s,
                best_ratio=1 - config.tokens_share * extra / (1 + extra),
                published_ratio=published[0] if published else None,
                published_elastic_ratio=published[1] if published else None,
            )
        )
    progress(1.0)
    return tuple(rows)


def _training_seconds(config: ScavengeConfig, extra: float) -> float:
    """Return the seconds until everything is merged."""
    each = round(config.hours * 3600 / config.step_seconds)
    tokens = config.islands * each * TOKENS_PER_STEP
    sync = config.exchange.sync(config.quorum, config.grace)
    fleet = VirtualFleet(config.exchange, sync, config.step_seconds, tokens)
    chance = np.random.default_rng(config.seed)

    def join(name: str) -> None:
        varying = chance.spawn(1)[0]
        steps = durations(config.step_seconds, config.step_spread, varying)
        fleet.join(name, config.step_seconds, steps, undisturbed())

    for i in range(config.islands):
        join(f"island-{i}")
    fleet.begin()
    fleet.run_to(round(tokens * (1 - config.tokens_share) / 2))
    names = [f"extra-{i}" for i in range(round(extra * config.islands))]
    for name in names:
        join(name)
    fleet.run_to(round(tokens * (1 + config.tokens_share) / 2))
    for name in names:
        fleet.leave(name)
    fleet.run_to(math.inf)
    return fleet.seconds
