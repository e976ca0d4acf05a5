"""Rows of `quality.py` on islands that are late, away or unlike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from quality_configs import (
    STEP_SECONDS,
    Row,
    Size,
    config,
    equal,
    fast_and_slow,
    network,
)

from diloco_jax.config import IslandConfig

AWAY_STEPS = 24


def trouble(size: Size) -> Iterator[Row]:
    """Late deltas, little time for grace, islands that are away, unlike shards."""
    for name, sync, merge_seconds in (
        ("tau 4", {"overlap_steps": 4}, 0.5),
        ("gamma 0.99", {"grace": 0.99}, 0.5),
        ("no time for grace", {}, 1.5),
        ("no time for grace, tau 4", {"overlap_steps": 4}, 1.5),
    ):
        settings: dict[str, Any] = dict(sync)
        yield Row(
            name=f"4 fast + 4 slow islands, {name}",
            group="trouble",
            against="decoupled, 4 fast + 4 slow islands",
            config=config(size, islands=fast_and_slow(size.sequences), **settings),
            options=network(2, out_of_phase=True, merge_seconds=merge_seconds),
        )
    yield from _varying(size)
    # What rows on unlike islands and failures have besides: their network.
    yield Row(
        name="decoupled, 8 islands, out of phase",
        group="trouble",
        against="decoupled, 8 islands",
        config=config(size),
        options=network(2, out_of_phase=True),
    )
    slow = dict(equal(8, size.sequences))
    # As many tokens per second as each of the others.
    slow["i0"] = IslandConfig(
        batch_size=2 * size.sequences // 8, step_seconds=2 * STEP_SECONDS
    )
    seven = {name: slow[name] for name in list(slow)[1:]}
    for name, islands, options in (
        ("one island at half the time", None, {"joins": {"i0": (0.0, 250.0)}}),
        ("one island with twice the batch at half the speed", slow, {}),
        ("seven of the eight islands", seven, {}),
        ("unlike shards", None, {"unlike_shards": True}),
    ):
        yield Row(
            name=name,
            group="trouble",
            against="decoupled, 8 islands",
            config=config(size, islands=islands),
            options=network(2, out_of_phase=islands is slow, **options),
        )
    away = config(size)
    faults = tuple(f"i0#{n}@{AWAY_STEPS}:kill" for n in range(1, 100))
    yield Row(
        name=f"one island down for {AWAY_STEPS} of every {2 * AWAY_STEPS} steps",
        group="trouble",
        against="decoupled, 8 islands",
        config=dataclasses.replace(
            away, placement=dataclasses.replace(away.placement, faults=faults)
        ),
        options=network(2, down_seconds=AWAY_STEPS * STEP_SECONDS),
    )


def _varying(size: Size) -> Iterator[Row]:
    """Yield rows whose steps or merges vary more, to see if grace needs its slack."""
    for what, changes in (
        ("steps +- 30 %", {"step_spread": 0.3}),
        ("merges +- 100 %", {"merge_spread": 1.0}),
    ):
        name = f"4 fast + 4 slow islands, {what}"
        for suffix, grace in (("", {}), (", gamma 0.99", {"grace": 0.99})):
            settings: dict[str, Any] = dict(grace)
            yield Row(
                name=name + suffix,
                group="trouble",
                against=name if suffix else "decoupled, 4 fast + 4 slow islands",
                config=config(size, islands=fast_and_slow(size.sequences), **settings),
                options=network(2, out_of_phase=True, **changes),
            )
