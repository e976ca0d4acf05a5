"""`diloco simulate goodput`: the chip time that interruptions leave to a fleet.

The published figures (arXiv 2604.21428) are for one interruption per chip and year and
1.2 million chips: 27 % without elasticity, 58 % for elastic data-parallel, 88 %
decoupled with 8 islands. The defaults are the calibration of docs/results/goodput.md.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

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
from diloco_jax.simulation.fleets import dataparallel
from diloco_jax.simulation.fleets.checks import (
    STEP_SECONDS,
    deltas_in_reach,
    in_reach,
    islands_in_reach,
    steps_in_reach,
)
from diloco_jax.simulation.fleets.failures import FailureModel, segments
from diloco_jax.simulation.fleets.fleet import ExchangeTerms, VirtualFleet
from diloco_jax.simulation.progress import Progress, nobody, part
from diloco_jax.simulation.virtual.steps import durations, lockstep_share

Method = Literal["decoupled", "elastic", "rigid"]
PUBLISHED_MTBI_YEARS = 1.0
PUBLISHED: dict[tuple[Method, int, int], float] = {
    ("rigid", 1_200_000, 1): 0.27,
    ("elastic", 1_200_000, 1): 0.58,
    ("decoupled", 1_200_000, 8): 0.88,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputConfig:
    """Chips, how they fail, and how they work together.

    Example:
      >>> from diloco_jax import GoodputConfig
      >>> GoodputConfig(chips=2_400_000, islands=16).label
      'decoupled, 16 islands'
    """

    method: Method = setting(
        "decoupled",
        help="How the chips work together: as islands, or as one data-parallel program "
        "on all chips (elastic, rigid), which at every step waits for the slowest of "
        "as many groups as there are islands.",
    )
    chips: int = setting(
        1_200_000, AT_LEAST_1, help="Chips of all islands together, shared out evenly."
    )
    islands: int = setting(8, AT_LEAST_1, help="Number of islands.")
    step_seconds: float = setting(
        10.0, STEP_SECONDS, help="Seconds of a step on all chips of an island."
    )
    step_spread: float = setting(
        0.0, SHARE, help="Standard deviation of the step time over its mean."
    )
    quorum: int = setting(SyncConfig.quorum, AT_LEAST_1, help="K (decoupled).")
    grace: float = setting(SyncConfig.grace, BELOW_1, help="gamma (decoupled).")
    hours: float = setting(
        24.0, POSITIVE, help="Simulated hours, shared out over the seeds."
    )
    seed: int = setting(0, NOT_NEGATIVE, help="The first of the seeds.")
    seeds: int = setting(
        3,
        AT_LEAST_1,
        help="Runs, each with its own failures; results are means, with the lowest and "
        "the highest run as bounds.",
    )
    failures: FailureModel = dataclasses.field(default_factory=FailureModel)
    exchange: ExchangeTerms = dataclasses.field(default_factory=ExchangeTerms)

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        self.failures.validate()
        self.exchange.validate()
        if self.seconds < self.step_seconds:
            raise ConfigError(
                f"hours = {self.hours:g} over seeds = {self.seeds} is {self.seconds:g} "
                f"s each, less than step_seconds = {self.step_seconds:g}; raise hours"
            )
        if self.method == "decoupled":
            islands_in_reach(self.islands, "islands")
        length = (self.hours, self.step_seconds, self.islands)
        steps_in_reach(*length)
        if self.method == "decoupled":
            deltas_in_reach(*length, self.exchange)
        rate = self.chips * self.failures.interruptions_per_chip_second
        interruptions = rate * self.hours * 3600
        in_reach("interruptions", interruptions, "lower hours, or raise mtbi_years")
        if self.quorum > self.islands:
            raise ConfigError(
                f"quorum = {self.quorum}, but islands = {self.islands}: no fragment "
                f"could ever merge; lower quorum or add islands"
            )
        if self.chips < self.islands * self.failures.slice_chips:
            raise ConfigError(
                f"chips = {self.chips} on islands = {self.islands} are fewer than one "
                f"slice each (slice_chips = {self.failures.slice_chips}); lower "
                f"slice_chips or islands, or add chips"
            )

    @property
    def seconds(self) -> float:
        """Simulated time of one seed."""
        return self.hours * 3600 / self.seeds

    @property
    def label(self) -> str:
        """Name of the way in which the chips work together."""
        if self.method != "decoupled":
            return f"{self.method} data-parallel"
        return f"decoupled, {self.islands} island{'s' * (self.islands > 1)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputSample:
    """Result of one run; all fields but `merges` are shares."""

    goodput: float
    compute_goodput: float
    uptime: float
    participation: float
    """Participation; 0 if nothing merges."""
    merges: float
    lost_tokens_fraction: float
    """Share of the computed tokens that was lost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputResult:
    """Results over all seeds."""

    config: GoodputConfig
    mean: GoodputSample
    low: GoodputSample
    high: GoodputSample
    samples: tuple[GoodputSample, ...]

    @property
    def published(self) -> float | None:
        """The published compute goodput of this setting, if there is one."""
        config = self.config
        if config.failures.mtbi_years != PUBLISHED_MTBI_YEARS:
            return None
        islands = config.islands if config.method == "decoupled" else 1
        return PUBLISHED.get((config.method, config.chips, islands))


def simulate_goodput(
    config: GoodputConfig, progress: Progress = nobody
) -> GoodputResult:
    """Simulate how a fleet's time is used, for every seed.

    Example:
      >>> from diloco_jax import GoodputConfig, simulate_goodput
      >>> rigid = GoodputConfig(method="rigid", hours=2, seeds=1)
      >>> found = simulate_goodput(rigid)
      >>> 0.2 < found.mean.compute_goodput < 0.35, found.published
      (True, 0.27)

    Args:
      progress: called with the share that is done, 0 to 1.

    Returns:
      `mean`, `low` and `high` over the seeds: goodput, compute_goodput, uptime and
      participation as shares of 1, and merges; `published`, where there is a figure.

    Raises:
      ConfigError: a field is out of bounds, or the simulation would take too long.
    """
    config.validate()
    samples = []
    for i in range(config.seeds):
        rng = np.random.default_rng(config.seed + i)
        sample = _decoupled if config.method == "decoupled" else _data_parallel
        samples.append(sample(config, rng, part(progress, i, config.seeds)))
    return GoodputResult(
        config=config,
        mean=_each(statistics.fmean, samples),
        low=_each(min, samples),
        high=_each(max, samples),
        samples=tuple(samples),
    )


def _decoupled(
    config: GoodputConfig, rng: np.random.Generator, progress: Progress
) -> GoodputSample:
    sync = config.exchange.sync(config.quorum, config.grace)
    fleet = VirtualFleet(config.exchange, sync, config.step_seconds)
    chips = config.chips / config.islands
    for name, own in zip(range(config.islands), rng.spawn(config.islands), strict=True):
        failing, varying = own.spawn(2)
        fleet.join(
            f"island-{name}",
            config.step_seconds,
            durations(config.step_seconds, config.step_spread, varying),
            segments(chips, config.failures, failing),
        )
    fleet.begin()
    fleet.run(config.seconds, progress)
    fleet.end()
    islands, totals = fleet.measures(), fleet.totals
    return GoodputSample(
        goodput=measures.goodput(islands),
        compute_goodput=measures.compute_goodput(islands),
        uptime=measures.uptime(islands, fleet.seconds),
        participation=fleet.participation(),
        merges=fleet.merges,
        lost_tokens_fraction=sum(totals.lost.values()) / max(totals.computed, 1),
    )


def _data_parallel(
    config: GoodputConfig, rng: np.random.Generator, progress: Progress
) -> GoodputSample:
    run = dataparallel.elastic if config.method == "elastic" else dataparallel.rigid
    steps = [config.step_seconds] * config.islands
    island = run(
        config.chips,
        config.step_seconds,
        config.failures,
        config.seconds,
        rng,
        computing=lockstep_share(steps, config.step_spread, rng),
    )
    progress(1.0)
    return GoodputSample(
        goodput=measures.goodput([island]),
        compute_goodput=measures.compute_goodput([island]),
        uptime=measures.uptime([island], config.seconds),
        participation=measures.participation(0, 0),
        merges=0,
        lost_tokens_fraction=0.0,
    )


def _each(
    how: Callable[[Sequence[float]], float], samples: Sequence[GoodputSample]
) -> GoodputSample:
    fields = [field.name for field in dataclasses.fields(GoodputSample)]
    return GoodputSample(**{n: how([getattr(s, n) for s in samples]) for n in fields})
