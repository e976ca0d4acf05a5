"""The parts of the rows of `quality.py`: sizes, configs, islands, networks."""

from __future__ import annotations

import dataclasses
from typing import Any

from diloco_jax.config import (
    Config,
    InnerConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import preset
from diloco_jax.simulation.emulation_options import EmulationOptions

MIN_SEEDS, HEADLINE_SEEDS = 3, 5
"""Seeds of a row. A bound needs as many pairs as a headline has."""
SEQUENCES = 32
STEP_SECONDS = 1.0
PLAIN = OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0)
"""In every row that does not say another, so that rows differ in one thing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Model, tokens, learning rates and batches of all rows."""

    model: ModelConfig
    tokens: int
    rates: tuple[tuple[int, float], ...]
    """Learning rates from so many islands on, 0 for data-parallel: the best of the
    sweep."""
    sequences: int = SEQUENCES
    """Sequences of all islands' batches together."""
    sequence: int = 128
    """Tokens of each sequence."""

    def rate(self, islands: int) -> float:
        """Return the learning rate for this number of islands."""
        return [rate for least, rate in self.rates if least <= islands][-1]


TINY = preset("tiny")
SIZES = {
    "0.04m": Size(
        model=dataclasses.replace(TINY, d_model=32, num_heads=2, mlp_dim=96),
        tokens=860_000,
        rates=((0, 16e-3),),
    ),
    "0.04m, short": Size(
        model=dataclasses.replace(TINY, d_model=32, num_heads=2, mlp_dim=96),
        tokens=600_000,
        rates=((0, 8e-3),),
        sequences=16,
    ),
    "0.1m": Size(model=TINY, tokens=2_000_000, rates=((0, 8e-3), (2, 4e-3))),
    # Where levers are screened, in small batches: `quality_levers.py`.
    "0.1m, short": Size(model=TINY, tokens=1_200_000, rates=((0, 4e-3),), sequences=16),
    # Past the steep part of the curve, where seeds are far apart: by more tokens, or by
    # more steps on as many.
    "0.1m, long": Size(model=TINY, tokens=8_000_000, rates=((0, 8e-3), (2, 4e-3))),
    "0.1m, batch 8": Size(
        model=TINY, tokens=2_000_000, rates=((0, 4e-3),), sequences=8
    ),
    # As many merges per fragment as the published outer optimizer is for.
    "0.1m, long, batch 8": Size(
        model=TINY, tokens=8_000_000, rates=((0, 4e-3),), sequences=8
    ),
    # On a GPU, with the text of `--text`.
    "0.3m": Size(
        model=preset("0.3m"),
        tokens=7_000_000,
        rates=((0, 4e-3), (1, 8e-3), (2, 4e-3)),
    ),
    "2m": Size(
        model=preset("2m"),
        tokens=40_000_000,
        rates=((0, 8e-3), (1, 4e-3), (3, 2e-3)),
        sequences=64,
        sequence=256,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration; `against` names the row that it is compared with."""

    name: str
    group: str
    config: Config
    options: EmulationOptions = EmulationOptions()  # noqa: RUF009
    plain: bool = False
    """Data-parallel: `diloco_jax.baseline` on this config."""
    moments_every: int = 0
    """Steps between two merges of moments, by `quality_moments.py`; 0: `emulate`."""
    merges_power: float = 1.0
    """There merge k of K comes after (k / K)^power of the steps."""
    merges_early: tuple[int, ...] = ()
    """Or every so many of the first so many steps, and the others evenly afterwards."""
    against: str = ""
    headline: bool = False

    def compared_with(self, name: str) -> Row:
        """Return the same row, compared with that row."""
        return dataclasses.replace(self, against=name)

    def same_run(self, other: Row) -> bool:
        """Return True if both rows are the same run under two names."""
        merges = ("moments_every", "merges_power", "merges_early")
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("config", "options", "plain", *merges)
        )


def config(
    size: Size,
    *,
    islands: dict[str, IslandConfig] | None = None,
    outer: OuterConfig | None = None,
    **sync: Any,
) -> Config:
    """Return the config of a row; by default 8 equal islands."""
    islands = islands or equal(8, size.sequences)
    rate = size.rate(len(islands))
    settings = {"steps_per_cycle": 12, "fragments": 12, **sync}
    return Config(
        run=RunConfig(
            model=size.model,
            inner=InnerConfig(learning_rate=rate),
            outer=outer or PLAIN,
            sync=SyncConfig(**settings),
            sequence_length=size.sequence,
            total_tokens=size.tokens,
        ),
        islands=islands,
        placement=Placement(baseline_learning_rate=0.0),
    )


def plain(size: Size, sequences: int) -> Config:
    """Return the config of data-parallel training with batches of `sequences`."""
    return inner(config(size, islands=equal(1, sequences)), "adamw", size.rate(0))


def inner(config: Config, optimizer: str, rate: float) -> Config:
    """Return the config with this inner optimizer; SGD has momentum 0.9."""
    momentum = (("momentum", 0.9),) if optimizer == "sgd" else ()
    inner = InnerConfig(optimizer=optimizer, learning_rate=rate, arguments=momentum)
    run = dataclasses.replace(config.run, inner=inner)
    return dataclasses.replace(config, run=run)


def network(
    tau: int, *, out_of_phase: bool = False, **changes: Any
) -> EmulationOptions:
    """Return the options of a merge that is adopted tau boundaries after its takes.

    out_of_phase: islands whose steps end at different times, by 10 % more or less. The
    merge itself takes a quarter of tau steps, the grace window has the rest. Otherwise
    no island is waited for, and the merge takes all but half a step of tau.
    """
    if out_of_phase:
        changes = {"step_spread": 0.1, "merge_seconds": tau / 4, **changes}
    seconds = changes.pop("merge_seconds", max(0.0, tau - 0.5))
    return EmulationOptions(merge_seconds=seconds * STEP_SECONDS, **changes)


def equal(count: int, sequences: int) -> dict[str, IslandConfig]:
    """Return `count` islands that share a batch of `sequences`."""
    batch = sequences // count
    return _islands_of((batch, STEP_SECONDS) for _ in range(count))


def fast_and_slow(sequences: int) -> dict[str, IslandConfig]:
    """Return islands of v6e and v5p: a gap of 18 % in speed."""
    batch = sequences // 8
    return _islands_of(
        (batch, STEP_SECONDS * (1.18 if i % 2 else 1.0)) for i in range(8)
    )


def unequal() -> dict[str, IslandConfig]:
    """Batches and speeds of slices of unlike sizes, `SEQUENCES` together."""
    shapes = ((8, 1.0), (8, 1.5), (4, 1.0), (4, 2.0), (2, 0.5), (2, 1.0), (2, 1.0))
    return _islands_of((*shapes, (2, 2.0)))


def _islands_of(shapes: Any) -> dict[str, IslandConfig]:
    return {
        f"i{number}": IslandConfig(batch_size=batch, step_seconds=seconds)
        for number, (batch, seconds) in enumerate(shapes)
    }
