"""A real run on packed rows, in rounds that count unequally, and its replay."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import support
import tape_checks
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import cli
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.data.loading import load_data
from diloco_jax.models.model import split_batch

pytestmark = pytest.mark.dist

TIMEOUT_S = 240
BATCH, STEPS = 4, 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> support.Run:
    """Done; one island accumulates two rounds, whose documents differ in number."""
    folder: Path = tmp_path_factory.mktemp("packed")
    lines = [f'{{"text": "{n} is {"x" * (n % 9)}"}}\n' for n in range(400)]
    (folder / "short.jsonl").write_text("".join(lines))
    prepared = str(folder / "short")
    command = ["data", "prepare", prepared, f"{prepared}.jsonl", "--workers", "1"]
    length = ["--sequence-length", str(SEQUENCE_LENGTH)]
    assert cli.main([*command, *length, "--validation-fraction", "0.1"]) == 0
    config = Config(
        run=RunConfig(
            model=MODEL,
            data=DataConfig(paths=(prepared,)),
            sync=SyncConfig(steps_per_cycle=6, fragments=2, quorum=2),
            sequence_length=SEQUENCE_LENGTH,
            total_tokens=2 * STEPS * BATCH * SEQUENCE_LENGTH,
        ),
        islands={
            "a": IslandConfig(batch_size=BATCH, accumulation=2, step_seconds=0.2),
            "b": IslandConfig(batch_size=BATCH, step_seconds=0.2),
        },
        placement=Placement(evaluate_every_steps=4, evaluate_batches=2),
    )
    return support.run_in(config.validate(), folder, TIMEOUT_S)


def test_tokens_are_positions_and_predictions_are_counted_apart(run):
    summary = run.summary
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(summary, run.tape, sizes) == []
    train = load_data(run.config.run).train
    rows = [dict(train[row]) for row in range(len(train))]
    counts = [int(split_batch(batched(row))[2].sum()) for row in rows]
    for island in summary["islands"].values():
        assert island["tokens_per_step"] == BATCH * SEQUENCE_LENGTH
        assert island["tokens_computed"] == island["steps"] * BATCH * SEQUENCE_LENGTH
        done = island["steps"] * BATCH
        assert done > 0
        assert min(counts) * done <= island["tokens_predicted"] <= max(counts) * done
    predicted = sum(i["tokens_predicted"] for i in summary["islands"].values())
    assert summary["tokens_predicted"] == predicted < summary["tokens_computed"]


def batched(row):
    return {name: array[None] for name, array in row.items()}


def test_packed_rows_are_replayed_bit_for_bit(run):
    command = [*support.DILOCO, "replay", str(run.workdir), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["identical"]
    assert outcome["merges"] == outcome["merges_on_tape"] >= 4
