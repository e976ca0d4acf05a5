"""A lead is killed with SIGKILL, and its workers outlive it: transfers under way end,
and the next lead's log says what counts."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import support
import tape_checks
from msgspec.structs import replace
from runtime_support import client, make_config, placed
from worker_support import (
    FIRST,
    PATIENCE_S,
    SECOND,
    Ask,
    delta_of,
    in_process,
    of_workers,
    send_here,
)

from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.rendezvous import Survivor
from diloco_jax.protocol.holding import (
    Committed,
    DeltaArrived,
    Forget,
    RestoreFragments,
)
from diloco_jax.wire.errors import Refused

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        not rendezvous.HAS_SURVIVORS, reason="workers end with their lead here"
    ),
]
LEAD = Path(__file__).with_name("lead_process.py")
ENDS_S = 20.0
TIMEOUT_S = 240.0


class Lead:
    """The process of a lead, which this test starts and kills."""

    def __init__(self, workdir: Path) -> None:
        paths = (str(LEAD.parent), str(LEAD.parent.parent), *sys.path)
        self.process = subprocess.Popen(
            [sys.executable, str(LEAD), str(workdir)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told = self.answer()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, "the lead has ended"
        return json.loads(line)

    def merge(self) -> str:
        """The digest of the publish that is prepared."""
        self.process.stdin.write("merge\n")
        self.process.stdin.flush()
        return self.answer()["digest"]

    def of_fragment(self, fragment: int) -> tuple[int, str, bytes]:
        """The worker of a fragment, its address, and the ticket for fragment 0."""
        own = self.told["dealt"][fragment]
        return own, self.told["addresses"][own], bytes.fromhex(self.told["ticket"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        # Its workers have them open.
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def run(text, tmp_path):
    """A run of two workers that has begun, and what one process makes of the same
    delta: the digests of its publish and of Theta."""
    config = placed(make_config(text), workers=2, time_budget_s=10.0)
    (tmp_path / "alone").mkdir(), (tmp_path / "spread").mkdir()
    in_process(config, tmp_path / "spread")[1].close()
    write_config_json(config, tmp_path / "spread" / "config.json")
    store, holder = in_process(config, tmp_path / "alone")
    before = store.digest_of(0)
    start, payload = delta_of(store, 0)
    alone = Ask(holder)
    merged = alone.merge(send_here(holder, payload), start), alone.commit(0)
    holder.close()
    return config, tmp_path / "spread", (start, payload), before, merged


@contextmanager
def killed(workdir: Path) -> Iterator[Lead]:
    """A lead, killed at the end of the block; no worker of it stays afterwards."""
    lead = Lead(workdir)
    try:
        yield lead
        lead.kill()
    except BaseException:
        lead.kill()
        for pid in lead.told["pids"]:
            os.kill(pid, signal.SIGKILL)
        raise


@contextmanager
def next_lead(config, workdir: Path, version, *fences: Forget) -> Iterator[Any]:
    """The lead after it, in this process, whose log has this version of fragment 0."""
    workers = of_workers(config, workdir)
    versions = [version, FIRST]
    asked = RestoreFragments(
        fragments=tuple(
            Committed(fragment=f, version=v, digests={}) for f, v in enumerate(versions)
        ),
        fences=fences,
    )
    try:
        restored = workers.restore(asked)
        yield workers, Ask(workers), restored
    finally:
        workers.end(PATIENCE_S)


def pids_of(workers) -> list[int]:
    return [worker.pid for worker in workers.processes()]


def halves(start, payload):
    """A delta in two stripes."""
    middle = len(payload) // 2
    yield replace(start, length=middle), payload.data[:middle]
    second = replace(start, offset=middle, length=len(payload) - middle)
    yield second, payload.data[middle:]


def test_a_transfer_under_way_ends_and_its_delta_counts(run):
    config, workdir, (start, payload), before, merged = run
    first, second = halves(start, payload)
    opened = ExitStack()
    with killed(workdir) as lead:
        own, address, ticket = lead.of_fragment(0)
        island = opened.enter_context(client(address))
        upload = island.transfers_at(address, own).upload
        upload(replace(first[0], ticket=ticket), first[1])
    with opened:
        upload(replace(second[0], ticket=ticket), second[1])
        with next_lead(config, workdir, FIRST) as (workers, ask, restored):
            assert pids_of(workers) == lead.told["pids"]
            survivors = [Survivor(pid) for pid in lead.told["pids"]]
            assert [f.snapshot for f in restored.fragments] == [FIRST, FIRST]
            assert restored.fragments[0].digest == before
            arrived = ask.await_(DeltaArrived)
            assert (arrived.island, arrived.tick) == ("a", 1)
            assert (ask.prepare(0), ask.commit(0)) == merged
    assert [survivor.wait(ENDS_S) for survivor in survivors] == [0, 0]


@pytest.mark.parametrize("version", [FIRST, SECOND])
def test_the_log_says_whether_what_was_prepared_counts(run, version):
    """Committed and not said, or never committed; either way by the same process."""
    config, workdir, (start, payload), before, merged = run
    with killed(workdir) as lead:
        own, address, ticket = lead.of_fragment(0)
        with client(address) as island:
            upload = island.transfers_at(address, own).upload
            upload(replace(start, ticket=ticket), payload.data)
        assert lead.merge() == merged[0]
    publishes = workdir / "publishes" / "00000"
    assert list(publishes.glob("*.publish"))
    with next_lead(config, workdir, version) as (workers, ask, restored):
        assert pids_of(workers) == lead.told["pids"]
        if version == SECOND:
            assert (restored.discarded, restored.fragments[0].snapshot) == (0, SECOND)
            assert restored.fragments[0].digest == merged[1]
        else:
            assert (restored.discarded, restored.fragments[0].digest) == (1, before)
            assert not list(publishes.glob("*.publish"))
            ask.await_(DeltaArrived)
            assert (ask.prepare(0), ask.commit(0)) == merged


def test_an_incarnation_that_has_ended_has_nothing_there(run):
    config, workdir, (start, payload), *_ = run
    opened = ExitStack()
    with killed(workdir) as lead:
        own, address, ticket = lead.of_fragment(0)
        island = opened.enter_context(client(address))
        upload = island.transfers_at(address, own).upload
        upload(replace(start, ticket=ticket), payload.data)
    fence = Forget(island="a", before=2, kept=())
    with opened, next_lead(config, workdir, FIRST, fence) as (workers, ask, _):
        with pytest.raises(Refused, match="fenced"):
            upload(replace(start, ticket=ticket), payload.data)
        assert pids_of(workers) == lead.told["pids"]
        workers.save_all(None)  # It answers after all that it had to say.
        assert ask.heard(DeltaArrived) == []


def test_workers_that_cannot_go_on_make_room_for_others(run):
    """The next lead has another config; then one has none of them."""
    config, workdir, *_ = run
    with killed(workdir) as lead:
        pass
    changed = placed(config, snapshot_every_s=77.0)
    with next_lead(changed, workdir, FIRST) as (workers, _, restored):
        assert set(pids_of(workers)).isdisjoint(lead.told["pids"])
        assert len(restored.fragments) == 2
    with killed(workdir) as lead:
        survivors = [Survivor(pid) for pid in lead.told["pids"]]
    rendezvous.end_others(workdir, 0)
    assert [survivor.wait(ENDS_S) for survivor in survivors] == [0, 0]
    assert not rendezvous.are_left(workdir)


def test_workers_whose_run_is_removed_end(run):
    _, workdir, *_ = run
    with killed(workdir) as lead:
        survivors = [Survivor(pid) for pid in lead.told["pids"]]
    shutil.rmtree(workdir)
    assert [survivor.wait(ENDS_S) for survivor in survivors] == [0, 0]


@pytest.mark.nightly
def test_a_run_goes_on_with_the_workers_of_a_lead_that_was_killed(text, tmp_path):
    """Between committed and sent, and between prepared and committed. Nothing is lost,
    and replay, in one process, has the same bits."""
    config = placed(
        make_config(text, cycles=40, quorum=1),
        workers=2,
        snapshot_every_s=2.0,
        checkpoint_every_s=0.0,
        faults=("coordinator@12:kill", "coordinator@30:kill-prepared"),
    )
    island = dataclasses.replace(config.islands["a"], step_seconds=0.25)
    config = dataclasses.replace(config, islands={"a": island, "b": island})
    run = support.run_in(config.validate(), tmp_path, TIMEOUT_S)
    recovered = [record for record in run.tape if record["kind"] == "recovered"]
    assert len(recovered) == 2
    for record in recovered:
        assert record["snapshot_versions"] == record["versions"], "none came from disk"
    assert recovered[1]["discarded"] == 1
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
    assert tape_checks.version_problems(run.tape) == []
    assert [i["tokens_lost"] for i in run.summary["islands"].values()] == [{}, {}]
    command = [*support.DILOCO, "replay", str(run.workdir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["identical"]
    assert outcome["merges"] == run.summary["merges"]
