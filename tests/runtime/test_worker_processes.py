"""Workers as on other machines: the bits of one process, and their end together with
the lead."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from runtime_support import client, hello, make_config, placed, run_scripted
from worker_support import (
    FIRST,
    PATIENCE_S,
    SECOND,
    Ask,
    WorkerProcess,
    delta_of,
    in_process,
    of_workers,
    send_here,
    snapshots_in,
    two_workers,
    with_workers,
)

from diloco_jax import cli, files, run_files
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.holding import fragment_snapshots as kept_cycles
from diloco_jax.coordinator.holding.fragment_snapshots import make_store
from diloco_jax.coordinator.workers import WorkersHolder
from diloco_jax.core.tiles import digest_arrays
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.holding import (
    AnchorKept,
    AwaitAnchor,
    Commit,
    Committed,
    DeltaArrived,
    Forget,
    RestoreFragments,
)
from diloco_jax.protocol.messages import AnchorRequest, TakeRequest, Version
from diloco_jax.wire import peers
from diloco_jax.wire.bulk import FetchRequest
from diloco_jax.wire.errors import ConnectionLost, Refused, SecurityError
from diloco_jax.wire.tls import TlsFiles

pytestmark = pytest.mark.dist


def digests(tape: list[dict]) -> dict[tuple, str]:
    """Digest of Theta by fragment and version."""
    return {
        (r["fragment"], *r["version"]): r["digest"]
        for r in tape
        if r["kind"] == "digested"
    }


def test_two_workers_merge_to_the_bits_of_one_process_and_replay_repeats_them(
    text, tmp_path
):
    config = make_config(text, cycles=2)
    alone = run_scripted(config, tmp_path / "alone")
    there = with_workers(config, tmp_path / "certificates", export_every=1)
    write_config_json(there, tmp_path / "config.json")
    with two_workers(tmp_path / "config.json", tmp_path):
        spread = run_scripted(there, tmp_path / "spread")
    assert {fragment for fragment, *_ in digests(alone)} == {0, 1}
    assert digests(alone) == digests(spread)
    assert_kept(config, tmp_path / "spread", digests(spread))
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = cli.main(["replay", str(tmp_path / "spread"), "--json"])
    found = json.loads(told.getvalue())
    assert code == 0
    assert found["identical"]
    assert found["merges"] == len(digests(spread))


def assert_kept(config, workdir: Path, merged: dict[Any, str]) -> None:
    """The cycles that came from workers have the bits of the merges."""
    store = make_store(config, build_plan(config.run, build(config.run)))
    folder = workdir / run_files.KEPT
    assert kept_cycles.cycle_numbers(folder)
    for cycle in kept_cycles.cycle_numbers(folder):
        for fragment in range(2):
            theta = store.room(fragment)["theta"]
            name = kept_cycles.kept_name(fragment)
            header, _ = files.read_sealed(
                kept_cycles.cycle_path(folder, cycle) / name, theta
            )
            key = (fragment, *header["version"])
            if key[-1]:
                assert digest_arrays(theta) == merged[key]


@pytest.fixture
def alone(text, tmp_path):
    """A config, its store with the first parameters, a delta, and the digests of its
    publish and of Theta as one process makes them."""
    config = placed(make_config(text), time_budget_s=10.0)
    (tmp_path / "alone").mkdir(), (tmp_path / "lead").mkdir()
    store, holder = in_process(config, tmp_path / "alone")
    start, payload = delta_of(store, 0)
    before = [store.digest_of(f) for f in range(2)]
    ask = Ask(holder)
    wanted = ask.merge(send_here(holder, payload), start), ask.commit(0)
    holder.close()
    assert wanted[1] != before[0]
    return config, store, (start, payload), before, wanted


def asked_for(*versions: Version, **fields: Any) -> RestoreFragments:
    """What a lead says whose log has these versions."""
    fragments = enumerate(versions)
    committed = [Committed(fragment=f, version=v, digests={}) for f, v in fragments]
    return RestoreFragments(fragments=tuple(committed), **fields)


@pytest.fixture
def unit(alone, tmp_path):
    """Leads of two workers, in this process, one after another; and the workers'."""
    config = with_workers(alone[0], tmp_path / "certificates")
    write_config_json(config, tmp_path / "config.json")
    with two_workers(tmp_path / "config.json", tmp_path) as processes:
        yield config, processes


def test_lead_and_workers_end_together_and_go_on_from_their_disks(
    alone, unit, tmp_path
):
    """A merge that was prepared never was, if the log lacks it; one that is committed
    is there. A worker takes in what the lead awaits alone; without its disk it goes on
    with an island's anchor. All of it over TLS."""
    _, store, (start, payload), before, wanted = alone
    config, processes = unit
    lead = tmp_path / "lead"
    tls = TlsFiles.load_given(config.placement.certificates, peers.island("a"))

    with leading(config, lead) as workers:
        restored = workers.restore(asked_for(FIRST, FIRST, first=True))
        assert [f.digest for f in restored.fragments] == before
        (own,) = [n for n in range(2) if 0 in workers.of(n)]
        there = tmp_path / f"worker-{own}"
        ask, address = Ask(workers), workers.shown()["workers"][own]["address"]
        with client(address, tls=tls) as island:
            at = island.transfers_at(address, own)
            with pytest.raises(SecurityError, match=f"of worker {own}, and has to be"):
                island.transfers_at(address, 1 - own).upload(start, payload.data)
            with pytest.raises(Refused, match="of island a") as refused:
                at.upload(replace(start, island="b"), payload.data)
            assert refused.value.code == "identity"
            with pytest.raises(Refused, match="this is for the coordinator"):
                at.fetch(fetch_of(0, FIRST, theta=True), max_bytes=1 << 30)
            with ThreadPoolExecutor(1) as beside:
                sent = beside.submit(at.upload, start, payload.data)
                time.sleep(0.2)
                assert not sent.done(), "it is busy until the lead awaits the take"
                take = TakeRequest(fragment=0, tick=1)
                of_a = hello(config, incarnation=1)
                assert workers.completed(of_a, take) == take
                asked = workers.completed(of_a, AnchorRequest(fragment=0))
                assert asked.workers[own] == address, "the Welcome may not have had it"
                sent.result(PATIENCE_S)
            assert ask.await_(DeltaArrived).refusal == ""
            assert ask.prepare(0) == wanted[0]
            workers.hold(Forget(island="a", before=2, kept=()))

            def fetched() -> None:
                """Fetch until the worker has heard of the fence."""
                until = time.monotonic() + PATIENCE_S
                while time.monotonic() < until:
                    at.fetch(fetch_of(0, FIRST), max_bytes=1 << 30)

            with pytest.raises(Refused, match="the first that counts is 2") as refused:
                fetched()
            assert refused.value.code == "fenced"
        assert list((there / "publishes" / "00000").glob("*.publish"))
        processes[own].kill()
        gone = str(ask.await_(ConnectionLost))
        assert f"worker {own}" in gone
        assert "start it again" in gone
    processes[own] = WorkerProcess(tmp_path / "config.json", own, there)

    with leading(config, lead) as workers:
        restored = workers.restore(asked_for(FIRST, FIRST))
        assert [f.digest for f in restored.fragments] == before
        assert restored.discarded == 1
        ask, address = Ask(workers), workers.shown()["workers"][own]["address"]
        take = TakeRequest(fragment=0, tick=1)
        workers.completed(hello(config, incarnation=1), take)
        with client(address, tls=tls) as island:
            at = island.transfers_at(address, own)
            at.upload(start, payload.data)
            assert ask.await_(DeltaArrived).refusal == ""
            assert (ask.prepare(0), ask.commit(0)) == wanted

    for folder in ("publishes", "checkpoints/coordinator"):
        shutil.rmtree(there / folder / "00000")
    with leading(config, lead) as workers:
        restored = workers.restore(asked_for(SECOND, FIRST))
        assert [f.fragment for f in restored.lost] == [0]
        ask = Ask(workers)
        address, begun = workers.shown()["workers"][own]["address"], Version(2, 1)
        workers.hold(
            AwaitAnchor(fragment=0, island="a", incarnation=1, term=begun.term)
        )
        anchor = b"".join(map(bytes, store.fetch(0, SECOND, None).buffers))
        whole = replace(start, tick=-1, version=SECOND)
        whole = replace(whole, length=len(anchor), total=len(anchor))
        with client(address, tls=tls) as island:
            at = island.transfers_at(address, own)
            at.upload(whole, anchor)
            found = ask.await_(AnchorKept)
            assert (found.replaced, found.version) == (SECOND, begun)
            with ThreadPoolExecutor(1) as beside:
                size = len(anchor)
                fetched = beside.submit(at.fetch, fetch_of(0, begun), max_bytes=size)
                assert not fetched.done(), "it waits for the commit"
                workers.hold(Forget(island="a", before=1, kept=()))  # It is let in.
                workers.hold(Commit(fragment=0, version=begun))
                assert bytes(fetched.result(PATIENCE_S).payload) == anchor
        assert workers.save_all(None)
        assert snapshots_in(lead) == [0, 1], "the result is here"
    assert [one.process.wait(PATIENCE_S) for one in processes] == [0, 0]


@contextlib.contextmanager
def leading(config: Any, workdir: Path, term: int = 1) -> Iterator[WorkersHolder]:
    """A lead of these workers, until the end of the block."""
    workers = of_workers(config, workdir, term)
    try:
        yield workers
    finally:
        workers.end()


def fetch_of(fragment: int, want: Version, **fields: Any) -> FetchRequest:
    return FetchRequest(
        run_id="r",
        island="a",
        incarnation=1,
        session="s",
        fragment=fragment,
        want=want,
        have=None,
        **fields,
    )
