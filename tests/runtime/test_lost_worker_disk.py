"""A worker process is killed and its disk is gone, in a run of two islands: its
fragments alone are gathered, the ledger is exact, and replay repeats all of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_support import await_state, coordinator, make_config, placed
from training_support import slowed, trained

from diloco_jax import cli
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.state import State

pytestmark = [pytest.mark.dist, pytest.mark.nightly]

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
        workers=2,
        time_budget_s=10.0,
        restart_delay_s=0.1,
        evaluate_every_steps=0,
        snapshot_every_s=2.0,
    )
    run = tmp_path / "run"
    with coordinator(config, run) as service:

        def kill_worker_of(fragment: int) -> None:
            holder = service.holder
            (own,) = [n for n in range(2) if fragment in holder.of(n)]
            os.kill(holder.processes()[own].pid, signal.SIGKILL)

        with trained(config, service.address, tmp_path):
            await_state(service, merged_to(3, 1, LOST))
            kill_worker_of(LOST)
            name = f"{LOST:05d}"
            shutil.rmtree(run / "publishes" / name)
            shutil.rmtree(run / "checkpoints" / "coordinator" / name)
            await_state(service, lambda state: state.fragments[LOST].away)
            there = service.lead.state.fragments[OTHER].version.number
            await_state(service, merged_to(0, 2, LOST))
            begun = service.lead.state.fragments[LOST].version.number
            await_state(service, merged_to(begun + 3, 2, LOST))
            away = service.lead.state.fragments[OTHER].version
            assert away.term == 1
            assert away.number > there + 3, "it went on meanwhile"
            kill_worker_of(OTHER)
            await_state(service, lambda state: state.fragments[OTHER].away)
            there = service.lead.state.fragments[OTHER].version.number
            await_state(service, merged_to(there + 2, 1, OTHER))
        state = service.lead.state
        assert ledger.check(state) == []
        lost = {
            name: account.lost_tokens.get("worker", 0)
            for name, account in state.fragments[LOST].accounts.items()
        }
    tape = list(read_tape(run / "tape.jsonl"))
    (back,) = of_kind(tape, "worker_recovered")
    assert back["fragments"] == [OTHER]
    assert 0.0 < back["away_seconds"] < 60.0
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


def replayed(run: Path, merges: int) -> None:
    """Replay repeats all of the merges, bit for bit."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = cli.main(["replay", str(run), "--until", str(merges), "--json"])
    found = json.loads(told.getvalue())
    assert (code, found["identical"], found["merges"]) == (0, True, merges), found
