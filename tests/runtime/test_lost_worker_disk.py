"""A worker of a run of two islands is killed, and another time loses its disk: lead and
workers start again, the lost fragments alone are gathered, the ledger is exact, and
replay repeats all of it."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_support import PATIENCE_S, await_state, make_config, placed
from training_support import slowed, trained
from worker_support import WorkerProcess, two_workers, with_workers

from diloco_jax import cli
from diloco_jax.cluster.cluster import free_port
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator import main
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.wire.errors import ConnectionLost

pytestmark = pytest.mark.dist

CYCLES = 10_000
"""More than the test takes."""
LOST, OTHER = 0, 1
"""Fragments; each is alone at its worker."""


def merged_to(number: int, term: int, fragment: int) -> Callable[[State], bool]:
    return lambda state: state.fragments[fragment].version >= (term, number)


def of_kind(tape: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in tape if record["kind"] == kind]


def test_a_worker_without_its_disk_is_given_its_fragment_by_an_island(text, tmp_path):
    config = placed(
        slowed(make_config(text, cycles=CYCLES, quorum=1)),
        bind=f"127.0.0.1:{free_port()}",
        time_budget_s=10.0,
        evaluate_every_steps=0,
        snapshot_every_s=2.0,
    )
    config = with_workers(config, tmp_path / "certificates")
    path, run = tmp_path / "config.json", tmp_path / "run"
    write_config_json(config, path)

    def led(until: Callable[[State], bool], kill: int | None) -> State:
        """A life of the coordinator until this; then the worker of a fragment dies."""
        service = main.Coordinator(config, run, init=not run.exists())
        with contextlib.closing(service):
            service.start()
            failed: list[BaseException] = []
            thread = threading.Thread(target=_run, args=(service, failed))
            thread.start()
            await_state(service, until, 3 * PATIENCE_S)
            state = service.lead.state
            if kill is not None:
                holder = service.holder
                (own,) = [n for n in range(2) if kill in holder.of(n)]
                processes[own].kill()
                thread.join(PATIENCE_S)
                assert isinstance(failed[0], ConnectionLost), "it ends with its worker"
                there = tmp_path / f"worker-{own}"
                if kill == LOST:
                    for folder in ("publishes", "checkpoints/coordinator"):
                        shutil.rmtree(there / folder)
                processes[own] = WorkerProcess(path, own, there)
            else:
                service.lead.stop()
                thread.join(PATIENCE_S)
            return state

    with (
        two_workers(path, tmp_path) as processes,
        trained(config, config.placement.bind, tmp_path),
    ):
        led(merged_to(3, 1, LOST), OTHER)
        led(merged_to(6, 1, LOST), LOST)
        state = led(merged_to(8, 2, LOST), None)
    assert ledger.check(state) == []
    assert state.fragments[OTHER].version.term == 1
    lost = {
        name: account.lost_tokens.get("worker", 0)
        for name, account in state.fragments[LOST].accounts.items()
    }
    tape = list(read_tape(run / "tape.jsonl"))
    assert len(of_kind(tape, "recovered")) == 2
    (record,) = of_kind(tape, "term_begun")
    assert (record["fragment"], record["version"][0]) == (LOST, 2)
    assert record["replaced"][0] == 1
    above = [
        merge
        for merge in of_kind(tape, "merged")
        if merge["fragment"] == LOST and record["replaced"] < merge["version"] < [2]
    ]
    booked = dict.fromkeys(lost, 0)
    for merge in above:
        for c in merge["contributions"]:
            booked[c["island"]] += c["tokens"]
    assert lost == booked
    replayed(run, len(of_kind(tape, "merged")))


def _run(service: main.Coordinator, failed: list[BaseException]) -> None:
    try:
        service.run()
    except ConnectionLost as error:
        failed.append(error)


def replayed(run: Path, merges: int) -> None:
    """Replay repeats all of the merges, bit for bit."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = cli.main(["replay", str(run), "--until", str(merges), "--json"])
    found = json.loads(told.getvalue())
    assert (code, found["identical"], found["merges"]) == (0, True, merges), found
