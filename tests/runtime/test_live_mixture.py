"""Two unlike islands train a mixture of experts as processes, and the one whose devices
share the experts is killed; `diloco chaos` kills the coordinator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import support
import tape_checks
from runtime_support import replayed

from diloco_jax import run_files
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.flops import product_weights
from diloco_jax.models.presets import preset

pytestmark = pytest.mark.dist

MODEL = dataclasses.replace(
    preset("0.3m"),
    num_layers=2,
    experts=8,
    experts_per_token=2,
    expert_dim=192,
    balance_loss=0.01,
)
LENGTH, ROWS, TIMEOUT_S = 32, 320, 200


def test_a_mixture_outlives_an_island_and_is_replayed_bit_for_bit(
    text: Path, tmp_path: Path
) -> None:
    assert 0.25e6 < product_weights(MODEL) < 0.4e6
    config = Config(
        run=RunConfig(
            model=MODEL,
            data=DataConfig(paths=(str(text),), validation_fraction=0.1),
            sync=SyncConfig(
                steps_per_cycle=6, fragments=3, quorum=1, weights_by_use="rows"
            ),
            sequence_length=LENGTH,
            total_tokens=ROWS * LENGTH,
        ),
        islands={
            # So slow that the run cannot end before the other is back.
            "whole": IslandConfig(batch_size=2, step_seconds=1.0),
            "shared": IslandConfig(batch_size=8, step_seconds=0.2, mesh_expert=2),
        },
        placement=Placement(
            faults=("shared@8:kill",), snapshot_every_s=2.0, restart_delay_s=0.2
        ),
    )
    chaos = ("chaos", "--strikes", "coordinator@2s:kill")
    run = support.run_in(config.validate(), tmp_path, TIMEOUT_S, chaos)
    report = json.loads((run.workdir / run_files.CHAOS_REPORT).read_bytes())
    (outcome,) = report["outcomes"]
    assert outcome["who"] == "coordinator"
    assert 0 < outcome["back_s"] < outcome["merged_s"]
    assert run.summary["phase"] == "done"
    joins = {name: own["joins"] for name, own in run.summary["islands"].items()}
    assert joins == {"whole": 1, "shared": 2}
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
    assert tape_checks.version_problems(run.tape) == []
    assert run.summary["islands"]["shared"]["tokens_merged"] > 0
    islands = [line for line in run.metrics if line["kind"] == "island"]
    assert any(line["adoption_loss"] is not None for line in islands)
    merges = [line for line in run.metrics if line["kind"] == "merge"]
    told = {name for line in merges for name in line["experts"] or ()}
    assert told == {"router_distance", "overlap", "entropy", "busiest"}
    loads = {
        name: own
        for line in merges
        for name, own in (line["expert_loads"] or {}).items()
    }
    assert {name[-1] for name in loads} == {"0", "1"}
    assert all(sum(own) == pytest.approx(8, abs=0.01) for own in loads.values())
    assert replayed(run.workdir)["merges"] == run.summary["merges"]
