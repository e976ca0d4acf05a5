"""The rows of `quality.py`: which runs, and what each is compared with.

All rows of one size train the same model on as many tokens of the same text, with 32
sequences in all islands' batches together; seeds give init and order of the data. What
a row leaves unsaid is as in `decoupled`: 8 equal islands, H = P = 12, overlap of 2
steps, K = 1 with grace, RDA, rebase, weights by tokens, int8 both ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from diloco_jax.config import (
    Config,
    InnerConfig,
    IslandConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import preset
from diloco_jax.simulation.options import EmulationOptions

SEQUENCES = 32
SEQUENCE = 128
STEP_SECONDS = 1.0
TOKENS_PER_PARAMETER = 20
RATES = (2e-3, 4e-3, 8e-3, 16e-3)
"""Learning rates swept for the headline rows, each method alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration; `against` names the row that it is compared with."""

    name: str
    group: str
    config: Config
    options: EmulationOptions = EmulationOptions()  # noqa: RUF009
    plain: bool = False
    """Data-parallel: `diloco_jax.baseline` on this config."""
    against: str = ""
    headline: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Model, tokens and learning rate of all rows."""

    preset: str
    tokens: int
    learning_rate: float
    """The best of the sweep for synchronous and decoupled DiLoCo with 8 islands."""
    learning_rate_alone: float
    """The best of the sweep for data-parallel; also for one island."""


SIZES = {
    "0.1m": Size(
        preset="tiny", tokens=2_000_000, learning_rate=4e-3, learning_rate_alone=8e-3
    ),
    "0.3m": Size(
        preset="0.3m", tokens=7_000_000, learning_rate=4e-3, learning_rate_alone=8e-3
    ),
}


def rows(size: Size) -> Iterator[Row]:
    """All rows, the ones that decide most first."""
    yield from _headlines(size)
    yield from _islands(size)
    yield from _merging(size)
    yield from _codecs(size)
    yield from _adoption(size)
    yield from _schedule(size)
    yield from _trouble(size)


def rates(size: Size) -> Iterator[Row]:
    """The sweep of learning rates, on the first seed, for every headline method."""
    for rate in RATES:
        inner = InnerConfig(learning_rate=rate)
        for row in _headlines(size):
            config = dataclasses.replace(
                row.config, run=dataclasses.replace(row.config.run, inner=inner)
            )
            yield dataclasses.replace(
                row,
                name=f"{row.name}, rate {rate:g}",
                group="rates",
                config=config,
                against="",
                headline=False,
            )


def _headlines(size: Size) -> Iterator[Row]:
    # Nothing but the sum of the batches is used of the islands.
    yield Row(
        name="data-parallel",
        group="headline",
        plain=True,
        headline=True,
        config=_config(size, islands=_equal(1)),
    )
    yield Row(
        name="synchronous DiLoCo, 8 islands",
        group="headline",
        headline=True,
        against="data-parallel",
        config=_config(
            size,
            quorum=8,
            grace=0.0,
            overlap_steps=0,
            fragments=1,
            codec_up="bf16",
            codec_down="bf16",
        ),
    )
    yield Row(
        name="decoupled, 8 islands",
        group="headline",
        headline=True,
        against="synchronous DiLoCo, 8 islands",
        config=_config(size),
        options=_network(2),
    )
    yield Row(
        name="decoupled, 4 fast + 4 slow islands",
        group="headline",
        headline=True,
        against="synchronous DiLoCo, 8 islands",
        config=_config(size, islands=_fast_and_slow()),
        options=_network(2, step_spread=0.1),
    )
    yield Row(
        name="decoupled, failures as at 1.2 M chips",
        group="headline",
        headline=True,
        against="synchronous DiLoCo, 8 islands",
        config=_config(size),
        options=_network(2, failure_every_seconds=200.0, down_seconds=12.0),
    )
    yield Row(
        name="one island, outer optimizer",
        group="headline",
        headline=True,
        against="data-parallel",
        config=_config(size, islands=_equal(1)),
        options=_network(2),
    )


def _islands(size: Size) -> Iterator[Row]:
    for count in (2, 4, 16):
        yield Row(
            name=f"decoupled, {count} islands",
            group="islands",
            against="data-parallel",
            config=_config(size, islands=_equal(count)),
            options=_network(2),
        )


def _merging(size: Size) -> Iterator[Row]:
    for name, changes in (
        ("mean", {"merge": "mean"}),
        ("K = 8 on unlike islands", {"quorum": 8, "unlike": True}),
        ("K = 1 without grace on unlike islands", {"grace": 0.0, "unlike": True}),
        ("K = 1 with grace on unlike islands", {"unlike": True}),
        ("uniform weights, unequal batches", {"weighting": "uniform", "batches": True}),
        (
            "weights tokens x rate, unequal batches",
            {"weighting": "tokens_times_rate", "batches": True},
        ),
        ("weights by tokens, unequal batches", {"batches": True}),
    ):
        sync: dict[str, Any] = dict(changes)
        unlike, batches = sync.pop("unlike", False), sync.pop("batches", False)
        islands = _fast_and_slow() if unlike else _unequal() if batches else None
        spread = 0.1 if unlike else 0.0
        yield Row(
            name=name,
            group="merging",
            against="decoupled, 8 islands",
            config=_config(size, islands=islands, **sync),
            options=_network(2, step_spread=spread),
        )


def _codecs(size: Size) -> Iterator[Row]:
    for name, sync in (
        ("bf16 both ways", {"codec_up": "bf16", "codec_down": "bf16"}),
        ("int4 both ways", {"codec_up": "int4", "codec_down": "int4"}),
        ("int4 up", {"codec_up": "int4"}),
        ("int8 without feedback", {"error_feedback": False}),
        (
            "int4 without feedback",
            {"codec_up": "int4", "codec_down": "int4", "error_feedback": False},
        ),
    ):
        against = "" if name.startswith("bf16") else "bf16 both ways"
        yield Row(
            name=name,
            group="codecs",
            against=against,
            config=_config(size, **sync),
            options=_network(2),
        )


def _adoption(size: Size) -> Iterator[Row]:
    for tau in (1, 2, 4):
        for adopt in ("rebase", "overwrite", "blend"):
            yield Row(
                name=f"{adopt}, tau {tau}",
                group="adoption",
                against="rebase, tau 1",
                config=_config(size, adopt=adopt, overlap_steps=tau),
                options=_network(tau),
            )


def _schedule(size: Size) -> Iterator[Row]:
    for cycle in (4, 12, 48):
        for optimizer, rate, momentum in (
            ("sgd", 1.0, 0.0),
            ("nesterov", 0.7, 0.9),
            ("nesterov", 0.4, 0.6),
        ):
            yield Row(
                name=f"H = {cycle}, {optimizer} {rate:g} / {momentum:g}",
                group="schedule",
                against="decoupled, 8 islands",
                config=_config(
                    size,
                    steps_per_cycle=cycle,
                    fragments=min(cycle, 12),
                    outer=OuterConfig(
                        optimizer=optimizer,  # type: ignore[arg-type]
                        learning_rate=rate,
                        momentum=momentum,
                    ),
                ),
                options=_network(2),
            )
    for fragments in (1, 4, 24):
        yield Row(
            name=f"P = {fragments}",
            group="schedule",
            against="decoupled, 8 islands",
            config=_config(size, fragments=fragments),
            options=_network(2),
        )


def _trouble(size: Size) -> Iterator[Row]:
    for plain in (True, False):
        config = _config(size)
        # The best of the quickstart's sweeps (docs/results/quickstart.md).
        rate = 8e-3 if plain else 6e-3
        inner = InnerConfig(optimizer="muon", learning_rate=rate)
        run = dataclasses.replace(config.run, inner=inner)
        yield Row(
            name=f"Muon inside{', data-parallel' if plain else ''}",
            group="trouble",
            plain=plain,
            against="data-parallel" if plain else "decoupled, 8 islands",
            config=dataclasses.replace(config, run=run),
            options=_network(2),
        )
    slow = dict(_equal(8))
    slow["i0"] = IslandConfig(batch_size=4, step_seconds=24 * STEP_SECONDS)
    for name, islands, options in (
        ("one island at half the time", None, {"joins": {"i0": (0.0, 250.0)}}),
        ("one island in every other merge", slow, {}),
        ("unlike shards", None, {"unlike_shards": True}),
    ):
        yield Row(
            name=name,
            group="trouble",
            against="decoupled, 8 islands",
            config=_config(size, islands=islands),
            options=_network(2, **options),
        )


def _config(
    size: Size,
    *,
    islands: dict[str, IslandConfig] | None = None,
    outer: OuterConfig | None = None,
    **sync: Any,
) -> Config:
    islands = islands or _equal(8)
    settings = {"steps_per_cycle": 12, "fragments": 12, **sync}
    rate = size.learning_rate_alone if len(islands) == 1 else size.learning_rate
    return Config(
        run=RunConfig(
            model=preset(size.preset),
            inner=InnerConfig(learning_rate=rate),
            outer=outer or OuterConfig(),
            sync=SyncConfig(**settings),
            sequence_length=SEQUENCE,
            total_tokens=size.tokens,
        ),
        islands=islands,
        placement=Placement(baseline_learning_rate=0.0),
    )


def _network(tau: int, **changes: Any) -> EmulationOptions:
    """Merges arrive so late that they are adopted tau boundaries after the take."""
    return EmulationOptions(merge_seconds=max(0.0, tau - 0.5) * STEP_SECONDS, **changes)


def _equal(count: int) -> dict[str, IslandConfig]:
    batch = SEQUENCES // count
    return _islands_of((batch, STEP_SECONDS) for _ in range(count))


def _fast_and_slow() -> dict[str, IslandConfig]:
    """v6e and v5p: a gap of 18 % in speed."""
    return _islands_of((4, STEP_SECONDS * (1.18 if i % 2 else 1.0)) for i in range(8))


def _unequal() -> dict[str, IslandConfig]:
    """Batches and speeds of slices of unlike sizes."""
    shapes = ((8, 1.0), (8, 1.5), (4, 1.0), (4, 2.0), (2, 0.5), (2, 1.0), (2, 1.0))
    return _islands_of((*shapes, (2, 2.0)))


def _islands_of(shapes: Any) -> dict[str, IslandConfig]:
    return {
        f"i{number}": IslandConfig(batch_size=batch, step_seconds=seconds)
        for number, (batch, seconds) in enumerate(shapes)
    }
