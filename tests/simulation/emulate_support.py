"""Configs of two islands to emulate, and the books of what came of it."""

from __future__ import annotations

import dataclasses

from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import Emulation
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.data.corpus import load_corpus

CYCLES = 3


def make_config(text: str, *, steps: int = 16, **sync) -> Config:
    """Islands `a` and `b` do so many steps of a second each, together."""
    settings = {"steps_per_cycle": 4, "fragments": 2, "overlap_steps": 1, "quorum": 2}
    run = RunConfig(
        model=MODEL,
        data=DataConfig(
            paths=(text,),
            validation_fraction=0.2,
            digest=load_corpus((text,), 0.2).digest,
        ),
        inner=InnerConfig(
            learning_rate=1e-2, schedule="constant", warmup_fraction=0, rewarm_steps=0
        ),
        outer=OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9),
        sync=SyncConfig(**{**settings, **sync}),
        sequence_length=SEQUENCE_LENGTH,
        total_tokens=steps * 6 * SEQUENCE_LENGTH,
    )
    islands = {
        "b": IslandConfig(batch_size=2, step_seconds=1.0),
        "a": IslandConfig(batch_size=4, step_seconds=1.0),
    }
    return Config(run=run, islands=islands)


def with_placement(config: Config, **placement) -> Config:
    return dataclasses.replace(config, placement=Placement(**placement))


def check_books(result: Emulation) -> None:
    """Every token is accounted for, and the history says the same."""
    summary = result.summary
    for part in (summary, *summary["islands"].values()):
        lost = sum(part["tokens_lost"].values())
        assert part["tokens_computed"] == (
            part["tokens_merged"] + lost + part["tokens_in_flight"]
        )
    merges = result.history.merges
    by_fragment = [
        int(merges["contributions"][merges["fragment"] == f].sum()) for f in range(2)
    ]
    assert by_fragment == summary["tokens_merged_by_fragment"]
