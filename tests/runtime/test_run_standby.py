"""`diloco run --with-standby`: the standby takes over, and one workdir is left."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import support
import tape_checks
from runtime_support import placed
from training_support import lasting

from diloco_jax import run_files
from diloco_jax.cluster import pair
from diloco_jax.cluster.children import start_child
from diloco_jax.config import Config
from diloco_jax.errors import EXIT_FAILED

pytestmark = [pytest.mark.dist, pytest.mark.timing]

TRAINING_SECONDS = 40
BUDGET_S, TIMEOUT_S = 4.0, 240.0
KILLED_AFTER = 12
"""Merges after which the coordinator is killed."""


def config_of(text: Path) -> Config:
    return placed(
        lasting(text, TRAINING_SECONDS),
        faults=(f"coordinator@{KILLED_AFTER}:kill",),
        # The killed one is back after its mandate is over.
        restart_delay_s=2 * BUDGET_S,
        time_budget_s=BUDGET_S,
        snapshot_every_s=2.0,
    )


def check(run_dir: Path, config: Config, tape: list[dict[str, Any]]) -> dict[str, Any]:
    """One workdir is left, and its books are exact; returns the summary."""
    summary: dict[str, Any] = json.loads((run_dir / run_files.SUMMARY).read_bytes())
    assert (summary["phase"], summary["term"]) == ("done", 1)
    assert summary["eval_loss"] > 0
    assert not (run_dir / run_files.STANDBY).exists()
    assert not (run_dir / run_files.MANDATE).exists()
    sizes = support.fragment_sizes(config)
    assert tape_checks.version_problems(tape) == []
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    assert tape_checks.row_problems(tape) == []
    return summary


@pytest.mark.nightly
def test_the_standby_of_a_local_run_takes_over_and_the_run_ends_in_its_workdir(
    text: Path, tmp_path: Path
) -> None:
    config = config_of(text)
    run = support.run_in(config, tmp_path, TIMEOUT_S, ["run", "--with-standby"])
    summary = check(run.workdir, config, run.tape)
    assert all(i["joins"] == 1 for i in summary["islands"].values())
    (back,) = (r["time"] for r in run.tape if r["kind"] == "recovered")
    logs = run.workdir / run_files.LOGS
    assert "takes over, from log" in (logs / "standby.log").read_text()
    times = [line["time"] for line in run.metrics]
    assert min(times) < back < max(times)


def test_a_run_that_is_stopped_while_its_standby_leads_goes_on(
    text: Path, tmp_path: Path
) -> None:
    config, workdir = config_of(text), tmp_path / "run"
    path, log = tmp_path / run_files.CONFIG, tmp_path / "diloco.log"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    words = [
        *support.DILOCO,
        "run",
        str(path),
        "--workdir",
        str(workdir),
        "--with-standby",
    ]
    with log.open("wb") as output:
        running = start_child(words, {}, output, output)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not (pair.standby_leads(workdir) and led_from(workdir)):
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        status = [*support.DILOCO, "status", str(workdir), "--json"]
        shown = subprocess.run(status, capture_output=True, timeout=TIMEOUT_S)
        assert json.loads(shown.stdout)["mandate"]["reign"] == 2
        running.send_signal(signal.SIGINT)
        assert running.wait(TIMEOUT_S) == EXIT_FAILED, log.read_text()
    finally:
        running.kill()
        running.wait()
    assert not (workdir / run_files.STANDBY).exists()
    again = [*support.DILOCO, "run", "--resume", str(workdir)]
    done = subprocess.run(again, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    tape = list(support.read_tape(workdir / run_files.TAPE))
    check(workdir, config, tape)
    assert [r["kind"] for r in tape].count("recovered") >= 2


def led_from(workdir: Path) -> bool:
    """The standby serves."""
    return pair.address_file(workdir).parent == pair.standby_of(workdir)
