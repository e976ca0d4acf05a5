"""An island and the coordinator are killed in one real run, and nothing is harmed."""

from __future__ import annotations

import numpy as np
import pytest
import support
import tape_checks

from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    ModelConfig,
    Placement,
    RunConfig,
    SyncConfig,
)

pytestmark = pytest.mark.dist

CYCLE_STEPS = 6
STEP_SECONDS, TRAINING_SECONDS = 0.25, 35
TIMEOUT_S = 240
GAP_MEDIANS_MAX, STALLED_MAX = 3.0, 0.05
BATCH, SEQUENCE = 2, 32


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> support.Run:
    """Done; island b was killed after 10 steps, the coordinator after 20 merges."""
    folder = tmp_path_factory.mktemp("kills")
    (folder / "text").mkdir()
    numbers = np.random.default_rng(0)
    for index in range(20):
        line = " ".join(str(n) for n in numbers.integers(0, 99, 2000))
        (folder / "text" / f"{index}.txt").write_text(line)
    steps = round(TRAINING_SECONDS / STEP_SECONDS)
    island = IslandConfig(batch_size=BATCH, step_seconds=STEP_SECONDS)
    config = Config(
        run=RunConfig(
            model=ModelConfig(
                d_model=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64
            ),
            data=DataConfig(paths=(str(folder / "text"),), validation_fraction=0.1),
            sync=SyncConfig(steps_per_cycle=CYCLE_STEPS, fragments=3, quorum=1),
            sequence_length=SEQUENCE,
            total_tokens=2 * steps * BATCH * SEQUENCE,
        ),
        islands={"a": island, "b": island},
        placement=Placement(faults=("b@10:kill", "coordinator@20:kill")),
    )
    return support.run_in(config.validate(), folder, TIMEOUT_S)


def test_the_faults_struck_and_everybody_came_back(run):
    islands = run.summary["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"a": 1, "b": 2}
    assert len(tape_checks.outage_seconds(run.tape)) == 1
    assert run.summary["phase"] == "done"


def test_no_step_waited_for_a_dead_process(run):
    a = run.summary["islands"]["a"]
    assert a["max_step_gap_seconds"] <= GAP_MEDIANS_MAX * a["median_step_seconds"]
    for island in run.summary["islands"].values():
        assert island["stalled_seconds"] <= STALLED_MAX * island["step_seconds"]


def test_no_version_goes_back(run):
    assert tape_checks.version_problems(run.tape) == []


def test_the_ledger_balances_with_the_tape(run):
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
    assert set(run.summary["islands"]["b"]["tokens_lost"]) <= {"died"}
    assert run.summary["islands"]["a"]["tokens_lost"] == {}


def test_the_killed_island_is_merged_again_within_a_cycle(run):
    assert tape_checks.steps_to_first_merge(run.tape, "b", 2) <= CYCLE_STEPS
