"""`diloco simulate goodput`: the chip time that interruptions leave to a fleet.

The published figures (arXiv 2604.21428) are for one interruption per chip and year and
1.2 million chips: 27 % without elasticity, 58 % for elastic data-parallel, 88 %
decoupled with 8 islands. The defaults are the calibration of docs/results/goodput.md.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from diloco_jax.config import ConfigError, SyncConfig
from diloco_jax.config.fields import (
    AT_LEAST_1,
    BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    check_bounds,
    explained,
    setting,
)
from diloco_jax.observability import measures
from diloco_jax.simulation.fleet import (
    STEP_SECONDS,
    ExchangeTerms,
    FailureModel,
    Progress,
    elastic,
    rigid,
    run_fleet,
    segments,
)

Method = Literal["decoupled", "elastic", "rigid"]
MOST_EVENTS = 1e8
"""Events that a simulation may have: hours on one core."""
PUBLISHED_MTBI_YEARS = 1.0
PUBLISHED: dict[tuple[Method, int, int], float] = {
    ("rigid", 1_200_000, 1): 0.27,
    ("elastic", 1_200_000, 1): 0.58,
    ("decoupled", 1_200_000, 8): 0.88,
}


@explained
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
        "on all chips (elastic, rigid).",
    )
    chips: int = setting(
        1_200_000, AT_LEAST_1, help="Chips of all islands together, shared out evenly."
    )
    islands: int = setting(8, AT_LEAST_1, help="Number of islands.")
    step_seconds: float = setting(
        10.0, STEP_SECONDS, help="Seconds of a step on all chips of an island."
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
        for what, count, remedy in self._events():
            if not count <= MOST_EVENTS:
                raise ConfigError(
                    f"that is {count:.2g} {what} to simulate, more than "
                    f"{MOST_EVENTS:.0e}; {remedy}"
                )
        decoupled = self.method == "decoupled"
        if decoupled and self.quorum > self.islands:
            raise ConfigError(
                f"quorum = {self.quorum}, but islands = {self.islands}: no fragment "
                f"could ever merge; lower quorum or add islands"
            )
        islands = self.islands if decoupled else 1
        if self.chips < islands * self.failures.slice_chips:
            raise ConfigError(
                f"chips = {self.chips} on islands = {islands} are fewer than one "
                f"slice each (slice_chips = {self.failures.slice_chips}); lower "
                f"slice_chips or islands, or add chips"
            )

    def _events(self) -> Iterator[tuple[str, float, str]]:
        """Yield what there is to simulate, how many, and what makes it fewer.

        At every delta the protocol goes through its books of all islands and fragments.
        """
        islands, exchange = self.islands, self.exchange
        pairs = f"pairs of {islands:,.15g} islands"
        steps = self.hours * 3600 / self.step_seconds * islands
        deltas = steps / exchange.cycle * exchange.fragments
        if self.method == "decoupled":
            yield pairs, islands * islands, "lower islands"
        yield "steps of islands", steps, "lower hours, or raise step_seconds"
        if self.method == "decoupled":
            yield (
                f"pairs of {deltas:.2g} deltas and fragments = {exchange.fragments}",
                deltas * exchange.fragments,
                "lower fragments or hours, or raise cycle or step_seconds",
            )
        rate = self.chips * self.failures.interruptions_per_chip_second
        interruptions = rate * self.hours * 3600
        yield "interruptions", interruptions, "lower hours, or raise mtbi_years"

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


FORMS = {
    "compute_goodput": ".1%",
    "goodput": ".1%",
    "uptime": ".1%",
    "participation": ".1%",
    "merges": ",.0f",
    "lost_tokens_fraction": ".3%",
}
"""Format of each measure, in the order in which people are shown them."""


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

    def json(self) -> dict[str, Any]:
        """Return the results as JSON-compatible builtins."""
        mean, low, high = map(dataclasses.asdict, (self.mean, self.low, self.high))
        return {
            **mean,
            "bounds": {name: [low[name], high[name]] for name in mean},
            "published_compute_goodput": self.published,
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
            "config": dataclasses.asdict(self.config),
        }

    def text(self) -> str:
        """Return the results for people, one measure a line."""
        config, published = self.config, ""
        if self.published is not None:
            published = f"; published {self.published:.0%}"
        lines = [
            f"{config.label}: {config.chips:,} chips, "
            f"{config.seeds} x {config.seconds / 3600:g} h"
        ]
        for name, form in FORMS.items():
            mean, low, high = (
                format(getattr(sample, name), form)
                for sample in (self.mean, self.low, self.high)
            )
            lines.append(f"  {name:<21}{mean:>8}  ({low} to {high}{published})")
            published = ""
        return "\n".join(lines)


def simulate_goodput(
    config: GoodputConfig, progress: Progress = lambda share: None
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
        samples.append(sample(config, rng, _part(progress, i, config.seeds)))

    def each(how: Callable[[Sequence[float]], float]) -> GoodputSample:
        return GoodputSample(
            **{name: how([getattr(s, name) for s in samples]) for name in FORMS}
        )

    return GoodputResult(
        config=config,
        mean=each(statistics.fmean),
        low=each(min),
        high=each(max),
        samples=tuple(samples),
    )


def _decoupled(
    config: GoodputConfig, rng: np.random.Generator, progress: Progress
) -> GoodputSample:
    chips, step_s = config.chips / config.islands, config.step_seconds
    lives = {
        f"island-{index}": segments(chips, config.failures, own.spawn(2)[0])
        for index, own in enumerate(rng.spawn(config.islands))
    }
    sync = config.exchange.sync(config.quorum, config.grace)
    fleet = run_fleet(config.exchange, sync, step_s, lives, config.seconds, progress)
    islands, totals = list(fleet.islands.values()), fleet.totals
    return GoodputSample(
        goodput=measures.goodput(islands),
        compute_goodput=measures.compute_goodput(islands),
        uptime=measures.uptime(islands, fleet.seconds),
        participation=fleet.participation,
        merges=fleet.merges,
        lost_tokens_fraction=sum(totals.lost.values()) / max(totals.computed, 1),
    )


def _data_parallel(
    config: GoodputConfig, rng: np.random.Generator, progress: Progress
) -> GoodputSample:
    run = elastic if config.method == "elastic" else rigid
    island = run(
        config.chips, config.step_seconds, config.failures, config.seconds, rng
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


def _part(progress: Progress, index: int, parts: int) -> Progress:
    """Return the progress of part `index`, from 0, of `parts` equal parts."""
    return lambda share: progress((index + share) / parts)
