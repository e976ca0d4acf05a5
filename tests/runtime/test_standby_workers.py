"""A coordinator with workers and its standby: first its lead dies and its workers live
on, then the machine of the node that leads since then is lost, workers included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import support
import tape_checks
from etils.epath import Path as Folder
from runtime_support import placed
from training_support import lasting

from diloco_jax import LocalCluster, run_files
from diloco_jax.cluster import pair
from diloco_jax.config import Config
from diloco_jax.coordinator.snapshots import named
from diloco_jax.coordinator.workers import rendezvous

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timing,
    pytest.mark.nightly,
    pytest.mark.skipif(
        not rendezvous.HAS_SURVIVORS, reason="workers end with their lead here"
    ),
]

TRAINING_SECONDS = 32
BUDGET_S, TIMEOUT_S = 4.0, 150.0
MERGES = 4
"""Merges before the first lead dies, and of each one that leads after it."""


class Run(NamedTuple):
    """A run that two take-overs did not end."""

    config: Config
    workdir: Path
    summary: dict[str, Any]
    tape: list[dict[str, Any]]
    workers: list[list[int]]
    """Process ids of the workers of the nodes that led, in turn."""


def config_of(text: Path) -> Config:
    return placed(
        lasting(text, TRAINING_SECONDS),
        workers=2,
        # Who is killed is back after its mandate is over.
        restart_delay_s=1.5 * BUDGET_S,
        time_budget_s=BUDGET_S,
        evaluate_every_steps=0,
        snapshot_every_s=4.0,
    )


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The process that inherits it may not ask how it ended.
    return stat.rpartition(")")[2].split()[0] != "Z"


def pids_of(status: dict[str, Any]) -> list[int]:
    return [worker["pid"] for worker in status["workers"]]


def leads(status: dict[str, Any], reign: int) -> bool:
    return "mandate" in status and status["mandate"]["reign"] == reign


def in_step(status: dict[str, Any], reign: int) -> bool:
    return leads(status, reign) and status["mandate"]["state"] == "in_step"


def has_files_of_workers(workdir: Path) -> bool:
    """Whether snapshots and publishes are there that were written since the fragments
    began."""
    found = (workdir / run_files.CHECKPOINTS / "coordinator").glob("*/*.snapshot")
    publishes = (workdir / run_files.PUBLISHES).glob("*/*.publish")
    snapshots = any(named(Folder(path))[1].number > 0 for path in found)
    return snapshots and any(publishes)


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    config, workers = config_of(text), []
    with LocalCluster(config, folder, with_standby=True) as cluster:
        status = cluster.until(
            lambda s: (
                in_step(s, 1)
                and s["merges"] >= MERGES
                and has_files_of_workers(pair.standby_of(cluster.workdir))
            ),
            TIMEOUT_S,
        )
        workers.append(pids_of(status))
        merges = status["merges"]
        cluster.coordinator.kill()
        assert all(map(is_alive, workers[0]))
        # Those of the node that is back end once it follows the other one.
        status = cluster.until(
            lambda s: (
                in_step(s, 2)
                and s["merges"] >= merges + MERGES
                and not any(map(is_alive, workers[0]))
            ),
            TIMEOUT_S,
        )
        workers.append(pids_of(status))
        cluster.coordinator.kill()
        for pid in workers[1]:
            os.kill(pid, signal.SIGKILL)
        merges = status["merges"]
        status = cluster.until(
            lambda s: leads(s, 3) and s["merges"] >= merges + MERGES, TIMEOUT_S
        )
        workers.append(pids_of(status))
        summary = cluster.wait(TIMEOUT_S)
    tape = list(support.read_tape(cluster.workdir / run_files.TAPE))
    return Run(config, cluster.workdir, summary, tape, workers)


def test_each_node_leads_with_workers_of_its_own_from_its_log(run: Run) -> None:
    pids = [pid for own in run.workers for pid in own]
    assert len(set(pids)) == len(pids) == 6
    assert not any(map(is_alive, pids))
    recovered = [record for record in run.tape if record["kind"] == "recovered"]
    assert len(recovered) == 2
    assert run.summary["term"] == 1
    # No fragment was lost, and gathered from islands.
    assert "term_begun" not in {record["kind"] for record in run.tape}
    # One workdir is left.
    assert not (run.workdir / run_files.STANDBY).exists()


def test_the_books_are_exact_and_no_island_noticed(run: Run) -> None:
    sizes = support.fragment_sizes(run.config)
    assert run.summary["phase"] == "done"
    assert tape_checks.version_problems(run.tape) == []
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
    assert tape_checks.interval_problems(run.tape) == []
    assert tape_checks.row_problems(run.tape) == []
    islands = run.summary["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"a": 1, "b": 1}
    assert all(i["tokens_lost"] == {} for i in islands.values())


def test_the_tape_repeats_the_whole_run(run: Run) -> None:
    command = [*support.DILOCO, "replay", str(run.workdir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["identical"]
    assert outcome["merges"] == run.summary["merges"]


def test_a_lead_that_is_back_in_time_leads_on_with_its_workers(text: Path) -> None:
    config = placed(config_of(text), time_budget_s=4 * BUDGET_S, restart_delay_s=0.1)
    with LocalCluster(config, with_standby=True) as cluster:
        status = cluster.until(
            lambda s: in_step(s, 1) and s["merges"] >= MERGES, TIMEOUT_S
        )
        workers, merges = pids_of(status), status["merges"]
        cluster.coordinator.kill()
        status = cluster.until(
            lambda s: in_step(s, 1) and s["merges"] >= merges + MERGES, TIMEOUT_S
        )
        assert pids_of(status) == workers
        summary = cluster.wait(TIMEOUT_S)
        tape = list(support.read_tape(cluster.workdir / run_files.TAPE))
    (recovered,) = (record for record in tape if record["kind"] == "recovered")
    assert recovered["snapshot_versions"] == recovered["versions"]
    sizes = support.fragment_sizes(config)
    assert tape_checks.version_problems(tape) == []
    assert tape_checks.ledger_problems(summary, tape, sizes) == []


def test_the_workers_of_a_lead_that_was_stopped_end(text: Path) -> None:
    """They leave it, or it ends them once it finds out that it leads no more."""
    with LocalCluster(config_of(text), with_standby=True) as cluster:
        status = cluster.until(
            lambda s: in_step(s, 1) and s["merges"] >= MERGES, TIMEOUT_S
        )
        workers, merges = pids_of(status), status["merges"]
        (lead,) = cluster.coordinator.pids
        cluster.coordinator.pause()
        cluster.until(
            lambda s: leads(s, 2) and s["merges"] >= merges + MERGES, TIMEOUT_S
        )
        os.kill(lead, signal.SIGCONT)
        cluster.until(lambda s: not any(map(is_alive, workers)), TIMEOUT_S)
        summary = cluster.wait(TIMEOUT_S)
        tape = list(support.read_tape(cluster.workdir / run_files.TAPE))
    sizes = support.fragment_sizes(config_of(text))
    assert tape_checks.version_problems(tape) == []
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
