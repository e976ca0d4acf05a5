"""Adapters over islands that are processes: frozen weights are read where an island
starts and starts again, adapters come from the coordinator, and both leave together."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import support
import tape_checks
from runtime_support import replayed
from safetensors.numpy import load_file
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import cli
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.loading import read_config_json
from diloco_jax.evaluation import load_params
from diloco_jax.weights import adapted
from diloco_jax.weights.tasks import open_model

pytestmark = pytest.mark.dist

FAMILIES = Path(__file__).parents[1] / "models" / "families"
TIMEOUT_S = 240
BATCH, STEPS = 2, 28


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> support.Run:
    """Done; the island of two devices was killed on the way."""
    folder: Path = tmp_path_factory.mktemp("adapters")
    (folder / "text").mkdir()
    for number in range(8):
        line = "the cat sat on the mat, and the dog on the log.\n"
        (folder / "text" / f"{number}.txt").write_text(line * 99)
    config = Config(
        run=RunConfig(
            model=dataclasses.replace(MODEL, lora_rank=2, lora_alpha=4.0),
            data=DataConfig(paths=(str(folder / "text"),), validation_fraction=0.3),
            inner=InnerConfig(optimizer="sgd", learning_rate=0.5),
            sync=SyncConfig(steps_per_cycle=6, fragments=2, quorum=1),
            sequence_length=SEQUENCE_LENGTH,
            total_tokens=2 * STEPS * BATCH * SEQUENCE_LENGTH,
        ),
        islands={
            "pair": IslandConfig(batch_size=BATCH, mesh_fsdp=2, step_seconds=0.2),
            # So slow that the run is not over before the other one is back.
            "solo": IslandConfig(batch_size=BATCH, step_seconds=0.6),
        },
        placement=Placement(faults=("pair@8:kill",)),
    )
    source = f"hf:{FAMILIES / 'smollm2'}"
    command = ("run", "--init", source)
    done = support.run_in(config.validate(), folder, TIMEOUT_S, command)
    resolved = read_config_json(done.workdir / "config.json")
    return dataclasses.replace(done, config=resolved)


def test_an_island_that_starts_again_goes_on_with_the_same_weights(run):
    islands = run.summary["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"pair": 2, "solo": 1}
    assert run.summary["phase"] == "done"
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
    adapters = load_params(run.workdir)
    assert set(adapters) == {"layers"}
    merged = adapted.merged(run.config.run, adapters)
    said = open_model(run.workdir).params
    for ours, theirs in zip(*map(leaves, (merged, said)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert any(np.asarray(leaf).any() for leaf in leaves(adapters))


def test_it_is_repeated_bit_for_bit_and_leaves_whole(run, tmp_path):
    replayed(run.workdir)
    assert (
        cli.main(["export", str(run.workdir), str(tmp_path / "out"), "--merged"]) == 0
    )
    whole = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(FAMILIES / "smollm2" / "model.safetensors")
    changed = {n for n, a in before.items() if not np.array_equal(a, whole[n])}
    assert changed
    assert all("_proj." in name for name in changed)


def leaves(tree) -> list:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [tree]
