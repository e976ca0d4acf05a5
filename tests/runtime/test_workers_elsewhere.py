"""Workers as on other machines: own workdirs, own keys, mutual TLS to the lead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import support
import tape_checks
from elsewhere_support import (
    CHECKPOINTS,
    WorkerProcess,
    snapshots_in,
    two_workers,
    with_workers_elsewhere,
)
from msgspec.structs import replace
from runtime_support import client, hello, make_config, placed
from test_worker_processes import assert_kept, digests
from training_support import slowed, trained
from worker_support import (
    FIRST,
    PATIENCE_S,
    Ask,
    delta_of,
    in_process,
    of_workers,
    send_here,
)

from diloco_jax.cluster.cluster import DILOCO, free_port
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator import snapshots
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.rendezvous import Survivor
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.holding import Committed, RestoreFragments
from diloco_jax.protocol.messages import TakeRequest
from diloco_jax.wire import principal
from diloco_jax.wire.tls import TlsFiles

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        not rendezvous.HAS_SURVIVORS, reason="workers end with their lead here"
    ),
]
TIMEOUT_S = 240.0
STEP_SECONDS = 0.3


def test_a_worker_elsewhere_merges_to_the_same_bits_and_obeys_the_newest_lead(
    text, tmp_path
):
    """It gets the first parameters from the lead; killed before a commit, it is started
    again there and has its disk; another lead goes on with the same processes, and the
    one before it is turned away."""
    config = placed(make_config(text), time_budget_s=10.0, restart_delay_s=0.1)
    config = with_workers_elsewhere(config, tmp_path / "certificates")
    write_config_json(config, tmp_path / "config.json")
    (tmp_path / "alone").mkdir(), (tmp_path / "lead").mkdir()
    in_process(config, tmp_path / "lead")[1].close()
    store, holder = in_process(config, tmp_path / "alone")
    start, payload = delta_of(store, 0)
    before = [store.digest_of(f) for f in range(2)]
    alone = Ask(holder)
    wanted = alone.merge(send_here(holder, payload), start), alone.commit(0)
    holder.close()
    first = RestoreFragments(
        fragments=tuple(
            Committed(fragment=f, version=FIRST, digests={}) for f in range(2)
        )
    )
    tls = TlsFiles.load_given(config.placement.certificates, principal.island("a"))
    with two_workers(tmp_path / "config.json", tmp_path) as processes:
        workers = of_workers(config, tmp_path / "lead")
        newer = None
        try:
            restored = workers.restore(first)
            assert [f.digest for f in restored.fragments] == before
            assert snapshots_in(tmp_path / "lead") == []
            (own,) = [n for n in range(2) if 0 in workers.of(n)]
            held = [snapshots_in(tmp_path / f"worker-{n}") for n in (own, 1 - own)]
            assert held == [[0], [1]]
            ask = Ask(workers)
            address = workers.processes()[own].address
            with client(address, tls=tls) as island:

                def send(start) -> object:
                    take = TakeRequest(fragment=0, tick=1)
                    ticket = workers.completed(hello(config), take).ticket
                    permitted = replace(start, ticket=ticket)
                    there = island.transfers_at(address, own)
                    return there.upload(permitted, payload.data)

                assert ask.merge(send, start) == wanted[0]
                pid = processes[own].worker()
                os.kill(pid, signal.SIGKILL)
                assert ask.await_(WorkerAway).worker == own
                workers.bring_back(own, [FIRST, FIRST])
                assert ask.await_(WorkerBack).worker == own
                assert processes[own].worker() != pid
                assert (ask.merge(send, start), ask.commit(0)) == wanted

            # An outpost alone dies: the worker serves on, and the line is new.
            pid = processes[1 - own].worker()
            processes[1 - own].kill()
            assert ask.await_(WorkerAway).worker == 1 - own
            workers.bring_back(1 - own, [FIRST.next(), FIRST])
            processes[1 - own] = WorkerProcess(
                tmp_path / "config.json", 1 - own, tmp_path / f"worker-{1 - own}"
            )
            assert ask.await_(WorkerBack).restored[0].snapshot == FIRST
            assert processes[1 - own].worker() == pid

            pids = [one.worker() for one in processes]
            survivors = [Survivor(pid) for pid in pids]
            newer = of_workers(config, tmp_path / "lead")
            last = RestoreFragments(
                fragments=(
                    Committed(fragment=0, version=FIRST.next(), digests={}),
                    Committed(fragment=1, version=FIRST, digests={}),
                )
            )
            went_on = newer.restore(last)
            assert went_on.fragments[0].digest == wanted[1]
            assert went_on.fragments[0].snapshot == FIRST.next(), "it lived on"
            assert [one.worker() for one in processes] == pids
            for _ in range(2):
                worker = ask.await_(WorkerAway).worker
                workers.bring_back(worker, [FIRST, FIRST])
            failure = heard_failure(ask)
            assert "another coordinator of this run was started later" in failure
            newer.answer(lambda message: None, lambda error: None)
            newer.save_all(None)
            assert snapshots_in(tmp_path / "lead") == [0, 1]
            # The end of the run reaches an outpost to which there is no line, too.
            processes[0].kill()
            processes[0] = WorkerProcess(
                tmp_path / "config.json", 0, tmp_path / "worker-0"
            )
        finally:
            workers.end(1.0)
            if newer is not None:
                newer.end(PATIENCE_S)
        assert [one.process.wait(PATIENCE_S) for one in processes] == [0, 0]
        assert [survivor.wait(PATIENCE_S) for survivor in survivors] == [0, 0]


def test_a_worker_that_is_asked_to_end_says_that_it_should_be_started_again(
    text, tmp_path
):
    config = with_workers_elsewhere(make_config(text), tmp_path / "certificates")
    write_config_json(config, tmp_path / "config.json")
    one = WorkerProcess(tmp_path / "config.json", 0, tmp_path / "worker-0")
    log = tmp_path / "worker-0.log"
    deadline = time.monotonic() + PATIENCE_S
    while "awaits the coordinator at 127.0.0.1" not in log.read_text():
        assert one.process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    one.process.terminate()
    assert one.process.wait(PATIENCE_S) == 1
    assert "Traceback" not in log.read_text()


def heard_failure(ask: Ask) -> str:
    while not isinstance(heard := ask._heard.get(timeout=PATIENCE_S), Exception):
        pass
    return str(heard)


@pytest.mark.nightly
def test_a_run_whose_machines_go_down_one_after_another(text, tmp_path):
    """The lead is killed, and a worker's machine; both are started again with their
    disks. The ledger is exact, replay, in one process, has the same bits, and the
    lead's workdir has all parameters at the end."""
    config = placed(
        slowed(make_config(text, cycles=24, quorum=1), STEP_SECONDS),
        bind=f"127.0.0.1:{free_port()}",
        time_budget_s=5.0,
        restart_delay_s=0.1,
        snapshot_every_s=2.0,
        checkpoint_every_s=0.0,
        export_every=3,
        faults=("coordinator@9:kill",),
    )
    config = with_workers_elsewhere(config, tmp_path / "certificates")
    path, run = tmp_path / "config.json", tmp_path / "run"
    write_config_json(config, path)
    lead = [*DILOCO, "coordinator", str(path), "--workdir", str(run)]
    with (
        two_workers(path, tmp_path) as processes,
        (tmp_path / "lead").open("ab") as log,
    ):

        def start(*options: str) -> subprocess.Popen:
            return subprocess.Popen([*lead, *options], stdout=log, stderr=log)

        service = start("--init")
        await_address(tmp_path, service)
        with trained(config, config.placement.bind, tmp_path):
            assert service.wait(TIMEOUT_S) == -signal.SIGKILL
            service = start()
            await_merges(run, 16)
            processes[0].kill_machine()
            processes[0] = WorkerProcess(path, 0, tmp_path / "worker-0")
            assert service.wait(TIMEOUT_S) == 0, (tmp_path / "lead").read_text()
        assert [one.process.wait(PATIENCE_S) for one in processes] == [0, 0]
    tape = list(read_tape(run / "tape.jsonl"))
    summary = json.loads((run / "summary.json").read_bytes())
    (again,) = [r for r in tape if r["kind"] == "recovered"]
    assert again["snapshot_versions"] == again["versions"], "workers lived on"
    (back,) = [r for r in tape if r["kind"] == "worker_recovered"]
    assert back["worker"] == 0
    sizes = support.fragment_sizes(config)
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    assert tape_checks.version_problems(tape) == []
    before = tape[: tape.index(back)]
    there = {r["fragment"]: r["version"] for r in before if r["kind"] == "merged"}
    recovered = [(fragment, *there[fragment]) for fragment in back["fragments"]]
    assert_kept(config, run, digests(tape), recovered)
    last = {r["fragment"]: r["version"] for r in tape if r["kind"] == "merged"}
    for fragment in range(2):
        found = snapshots.versions(run / CHECKPOINTS, fragment)
        assert [list(version) for version in found] == [last[fragment]]
    words = [*DILOCO, "replay", str(run), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["identical"]
    assert outcome["merges"] == summary["merges"]


def await_address(folder: Path, service: subprocess.Popen) -> None:
    """Until the coordinator in `folder` serves."""
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "run" / "coordinator.address").exists():
        assert service.poll() is None, (folder / "lead").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def await_merges(run: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while sum(r["kind"] == "merged" for r in read_tape(run / "tape.jsonl")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.2)
