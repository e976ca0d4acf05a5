"""`diloco chaos` strikes workers and a standby of a real run."""

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
from diloco_jax.chaos.options import ChaosOptions
from diloco_jax.observability.tape import read_tape

pytestmark = pytest.mark.dist

TRAINING_SECONDS = 25


def test_a_worker_a_standby_and_who_leads_are_killed(
    text: Path, tmp_path: Path
) -> None:
    config = placed(
        lasting(text, TRAINING_SECONDS),
        workdir=str(tmp_path / "run"),
        workers=2,
        time_budget_s=4.0,
        snapshot_every_s=2.0,
        restart_delay_s=0.2,
    )
    strikes = ("worker-1@1s:kill", "standby@6s:kill", "coordinator@12s:kill")
    said = io.StringIO()
    code, findings = command.run(
        config,
        "run.py",
        Console(file=said, width=200),
        ChaosOptions(strikes=strikes, with_standby=True),
    )
    assert code == 0, said.getvalue()
    outcomes = {outcome["who"]: outcome for outcome in findings["outcomes"]}
    assert set(outcomes) == {"worker-1", "standby", "coordinator"}, said.getvalue()
    assert outcomes["worker-1"]["back_s"] is not None
    for outcome in outcomes.values():
        assert outcome["merged_s"] is not None, outcome
    tape = list(read_tape(tmp_path / "run" / run_files.TAPE))
    assert list(tape_checks.version_problems(tape)) == []
