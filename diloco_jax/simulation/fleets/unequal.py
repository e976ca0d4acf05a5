"""`diloco simulate mix` and `scavenge`: islands of two generations, and extra islands.

Mix: 4 islands v6e and 4 v5p, 18 % apart in speed, 10 % spread (arXiv 2604.21428).
Published goodput: 84 % waiting for all, 100 % with K = 1, with grace and without. In
this product K = M does not make islands wait: ticks come when the slowest island has
done its steps, and the others go on meanwhile. The published 84 % counts the cost of a
step that waits for every island, which is the row "lockstep".

Scavenge: extra islands for a part of the token budget. The part lies in the middle of
the budget: extra islands join when it begins and leave when it ends. The published
training times, relative to the same run without them, are for half of the budget. The
same tokens at a speed higher by a share x take at best 0.5 + 0.5 / (1 + x).
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
from diloco_jax.observability import measures
from diloco_jax.simulation.fleets.failures import undisturbed
from diloco_jax.simulation.fleets.fleet import (
    STEP_SECONDS,
    TOKENS_PER_STEP,
    ExchangeTerms,
    VirtualFleet,
    require_reach_of_islands,
    require_reach_of_steps,
)
from diloco_jax.simulation.output import Progress, nobody, part
from diloco_jax.simulation.virtual.island import durations, lockstep_share

PUBLISHED_GOODPUT = {"lockstep": 0.84, "K = 1": 1.0, "K = 1 with grace": 1.0}
PUBLISHED_TIMES = {
    0.25: (0.90, 1.07),
    0.5: (0.83, 1.09),
    1.0: (0.75, 1.02),
    3.0: (0.62, 0.80),
}
"""Time ratios, decoupled and elastic data-parallel, by share of extra compute."""


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

    @property
    def islands(self) -> int:
        """Number of islands."""
        return self.v6e + self.v5p

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        if self.islands < 2:
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
        require_reach_of_islands(self.islands, "v6e or v5p")
        require_reach_of_steps(
            self.hours, self.step_seconds, self.islands, self.exchange
        )

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
    means = config.mean_step_seconds()
    rng = np.random.default_rng(config.seed)
    # An island computes for that share of its time: all islands make as many steps.
    share = lockstep_share(list(means.values()), config.step_spread, rng)
    lockstep = MixRow(
        name="lockstep",
        goodput=share,
        compute_goodput=share,
        participation=1.0,
        merges_per_hour=3600 / (sum(means.values()) / len(means) / share),
        published_goodput=config.published_goodput("lockstep"),
    )
    ways = (
        ("K = M", config.islands, config.grace),
        ("K = 1", 1, 0.0),
        ("K = 1 with grace", 1, config.grace),
    )
    rows = [lockstep]
    for i, (name, quorum, grace) in enumerate(ways):
        sync = config.exchange.sync(quorum, grace)
        fleet = VirtualFleet(config.exchange, sync, config.step_seconds)
        rngs = np.random.default_rng(config.seed).spawn(len(means))
        for (island, mean), rng in zip(means.items(), rngs, strict=True):
            steps = durations(mean, config.step_spread, rng)
            fleet.join(island, mean, steps, undisturbed())
        fleet.begin()
        fleet.run(config.hours * 3600, part(progress, i, len(ways)))
        fleet.end()
        rows.append(
            MixRow(
                name=name,
                goodput=measures.goodput(fleet.measures()),
                compute_goodput=measures.compute_goodput(fleet.measures()),
                participation=fleet.participation(),
                merges_per_hour=fleet.merges / config.hours,
                published_goodput=config.published_goodput(name),
            )
        )
    return tuple(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScavengeConfig:
    """A run, and the islands that it gets on top."""

    islands: int = setting(8, AT_LEAST_1, help="Islands of the whole run.")
    extra: tuple[float, ...] = setting(
        tuple(PUBLISHED_TIMES),
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
        require_reach_of_islands(self.islands, "islands")
        require_reach_of_steps(
            self.hours, self.step_seconds, self.islands, self.exchange
        )
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
            fields = f"islands, or extra = {extra:g}"
            require_reach_of_islands(self.islands + added, fields)


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
        published: tuple[float | None, float | None] = (None, None)
        if config.tokens_share == 0.5:
            published = PUBLISHED_TIMES.get(extra, published)
        rows.append(
            ScavengeRow(
                extra=extra,
                hours=seconds / 3600,
                time_ratio=seconds / without_s,
                best_ratio=1 - config.tokens_share * extra / (1 + extra),
                published_ratio=published[0],
                published_elastic_ratio=published[1],
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

    def join(name: str, count: int) -> list[str]:
        names = [f"{name}-{i}" for i in range(count)]
        for each in names:
            varying = chance.spawn(1)[0]
            steps = durations(config.step_seconds, config.step_spread, varying)
            fleet.join(each, config.step_seconds, steps, undisturbed())
        return names

    join("island", config.islands)
    fleet.begin()
    fleet.run_to(round(tokens * (1 - config.tokens_share) / 2))
    added = join("extra", round(extra * config.islands))
    fleet.run_to(round(tokens * (1 + config.tokens_share) / 2))
    for name in added:
        fleet.leave(name)
    fleet.run_to(math.inf)
    return fleet.seconds
