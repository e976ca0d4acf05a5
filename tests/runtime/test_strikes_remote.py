"""`diloco chaos HOST:PORT` has a run strike itself, if it lets an operator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_support import placed
from training_support import lasting

from diloco_jax import run_files
from diloco_jax.cluster.local import LocalCluster

pytestmark = pytest.mark.dist

TRAINING_SECONDS = 25
TIMEOUT_S = 120.0


@pytest.mark.parametrize("allowed", [True, False])
def test_an_island_strikes_itself_if_it_may(
    text: Path, tmp_path: Path, allowed: bool
) -> None:
    config = placed(lasting(text, TRAINING_SECONDS), chaos=allowed, time_budget_s=4.0)
    island = next(iter(config.islands))
    with LocalCluster(config, tmp_path) as cluster:
        cluster.until(lambda status: status["merges"] > 0, TIMEOUT_S)
        address = (cluster.workdir / run_files.ADDRESS).read_text().strip()
        keys = str(cluster.workdir / run_files.KEYS)
        words = ["--certificates", keys, "--strikes", f"{island}@1s:kill", "--json"]
        command = [sys.executable, "-m", "diloco_jax.cli", "chaos", address, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if not allowed:
            assert done.returncode != 0
            assert "placement.chaos is off" in done.stderr
            return
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)["outcomes"]
        assert found["who"] == island
        assert found["merged_s"] is not None
        incarnations = cluster.status()["islands"][island]["incarnation"]
        assert incarnations > 1
