"""`diloco chaos` strikes workers and the coordinator of a real run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

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

TRAINING_SECONDS = 18
"""Longer than the last strike by far. The end of a run waits for who is away then, so
that a start may take as long as it does."""


def struck(text: Path, workdir: Path, *strikes: str) -> dict[str, Any]:
    """Return the outcomes, by name, of strikes on a run with workers."""
    config = placed(
        lasting(text, TRAINING_SECONDS),
        workdir=str(workdir),
        workers=2,
        time_budget_s=4.0,
        snapshot_every_s=2.0,
        restart_delay_s=0.2,
    )
    said = io.StringIO()
    code, findings = command.run(
        config,
        "run.py",
        Console(file=said, width=200),
        ChaosOptions(strikes=strikes),
    )
    assert code == 0, said.getvalue()
    outcomes = {outcome["who"]: outcome for outcome in findings["outcomes"]}
    assert len(outcomes) == len(strikes), said.getvalue()
    tape = list(read_tape(workdir / run_files.TAPE))
    assert list(tape_checks.version_problems(tape)) == []
    return outcomes


def test_whoever_is_killed_is_back(text: Path, tmp_path: Path) -> None:
    strikes = ("worker-1@2s:kill", "coordinator@8s:kill")
    outcomes = struck(text, tmp_path / "run", *strikes)
    assert set(outcomes) == {"worker-1", "coordinator"}
    for outcome in outcomes.values():
        assert outcome["back_s"] is not None
        assert outcome["merged_s"] is not None
