"""`diloco chaos` strikes the coordinator of a real run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import tape_checks
from rich.console import Console
from runtime_support import placed
from training_support import lasting

from diloco_jax import run_files
from diloco_jax.chaos import command
from diloco_jax.chaos.schedule import ChaosOptions
from diloco_jax.observability.tape import read_tape

pytestmark = pytest.mark.dist

TRAINING_SECONDS = 12
"""Longer than the last strike by far. The end of a run waits for who is away then, so
that a start may take as long as it does."""


def test_a_coordinator_that_is_killed_is_back(text: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    config = placed(
        lasting(text, TRAINING_SECONDS),
        workdir=str(workdir),
        time_budget_s=4.0,
        snapshot_every_s=2.0,
        restart_delay_s=0.2,
    )
    said = io.StringIO()
    strikes = ChaosOptions(strikes=("coordinator@2s:kill",))
    code, findings = command.run(
        config, "run.py", Console(file=said, width=200), strikes
    )
    assert code == 0, said.getvalue()
    (outcome,) = findings["outcomes"]
    assert outcome["who"] == "coordinator"
    assert outcome["back_s"] is not None
    assert outcome["merged_s"] is not None
    tape = list(read_tape(workdir / run_files.TAPE))
    assert list(tape_checks.version_problems(tape)) == []
