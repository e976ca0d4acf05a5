"""Worker processes: the bits of one process, and one that is killed before a commit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
from collections.abc import Collection
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
    delta_of,
    in_process,
    of_workers,
    send_here,
)

from diloco_jax import cli, run_files, storage
from diloco_jax.coordinator import kept as kept_cycles
from diloco_jax.coordinator import snapshots
from diloco_jax.coordinator.holding.fragment_snapshots import make_store
from diloco_jax.core.fragments import digest_arrays
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.holding import (
    AnchorKept,
    AwaitAnchor,
    Commit,
    Committed,
    Forget,
    RestoreFragments,
)
from diloco_jax.protocol.messages import AnchorRequest, Published, TakeRequest
from diloco_jax.protocol.values import Version
from diloco_jax.wire import principal
from diloco_jax.wire.bulk import FetchRequest, UploadStart
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.errors import NO_TICKET, Refused, SecurityError
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
    placement = {"workers": 2, "export_every": 1}
    spread = run_scripted(placed(config, **placement), tmp_path / "spread")
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


def assert_kept(
    config, workdir: Path, merged: dict[Any, str], recovered: Collection[Any] = ()
) -> None:
    """The cycles that the workers wrote have the bits of the merges. recovered:
    fragments and versions that came from the disk, where Theta is the anchor."""
    store = make_store(config, build_plan(config.run, build(config.run)), None)
    folder = workdir / run_files.KEPT
    assert kept_cycles.numbers(folder)
    for cycle in kept_cycles.numbers(folder):
        for fragment in range(2):
            theta = snapshots.empty({"theta": store.like(fragment)["theta"]})["theta"]
            name = kept_cycles.fragment_name(fragment)
            header, _ = storage.read_sealed(
                kept_cycles.path_of(folder, cycle) / name, theta
            )
            key = (fragment, *header["version"])
            if key[-1] and key not in recovered:
                assert digest_arrays(theta) == merged[key]


def test_a_worker_killed_before_the_commit_is_back_without_the_merge(text, tmp_path):
    """The merge that it prepared never was; the other worker notices nothing; the same
    merge once more gives the bits of a process that was not killed. Without its disk
    it goes on with an island's anchor, once that is committed. All of it over TLS."""
    folder = tmp_path / "certificates"
    make_certificates(folder, [], 1, islands=["a"], workers=2)
    certificates = str(folder)
    config = placed(
        make_config(text),
        workers=2,
        time_budget_s=PATIENCE_S,
        certificates=certificates,
    )
    tls = TlsFiles.load_given(certificates, principal.island("a"))
    (tmp_path / "alone").mkdir(), (tmp_path / "spread").mkdir()
    in_process(config, tmp_path / "spread")[1].close()
    store, holder = in_process(config, tmp_path / "alone")
    everything = range(len(store.plan.fragments))
    start, payload = delta_of(store, 0)

    before = [store.digest_of(f) for f in everything]
    alone = Ask(holder)
    wanted = alone.merge(send_here(holder, payload), start), alone.commit(0)
    holder.close()
    assert wanted[1] != before[0]

    workers = of_workers(config, tmp_path / "spread")
    try:
        first = tuple(
            Committed(fragment=f, version=FIRST, digests={}) for f in everything
        )
        restored = workers.restore(RestoreFragments(fragments=first))
        assert [f.digest for f in restored.fragments] == before
        ask = Ask(workers)
        (own,) = [n for n in range(2) if 0 in workers.of(n)]
        address = workers.processes()[own].address
        with client(address, tls=tls) as island:
            there = island.transfers_at(address, own)
            with pytest.raises(SecurityError, match=f"of worker {own}, and has to be"):
                island.transfers_at(address, 1 - own).upload(start, payload.data)

            def send(start: UploadStart) -> object:
                who = hello(config, incarnation=start.incarnation)
                take = TakeRequest(fragment=start.fragment, tick=start.tick)
                permitted = replace(start, ticket=workers.completed(who, take).ticket)
                return there.upload(permitted, payload.data)

            def refused(
                start: UploadStart, send: Any, why: str, code: str = NO_TICKET
            ) -> None:
                with pytest.raises(Refused, match=why) as refusal:
                    send(start)
                assert refusal.value.code == code

            refused(replace(start, island="b"), send, "of island a", "identity")
            before_it = replace(start, incarnation=0)
            refused(start, lambda start: there.upload(start, payload.data), "malformed")
            fence = Forget(island="a", before=1, kept=())
            workers.hold(fence)
            assert ask.merge(send, start) == wanted[0]
            pids = [worker.pid for worker in workers.processes()]
            os.kill(pids[own], signal.SIGKILL)
            assert ask.await_(WorkerAway).worker == own
            publishes = tmp_path / "spread" / "publishes" / "00000"
            assert list(publishes.glob("*.publish"))
            workers.bring_back(own, [FIRST] * len(everything), (fence,))
            assert ask.await_(WorkerBack).worker == own
            assert not list(publishes.glob("*.publish"))
            refused(before_it, send, "fenced")
            assert workers.processes()[1 - own].pid == pids[1 - own]
            assert (ask.merge(send, start), ask.commit(0)) == wanted

            # It is killed once more, and its disk is gone.
            os.kill(workers.processes()[own].pid, signal.SIGKILL)
            assert ask.await_(WorkerAway).worker == own
            shutil.rmtree(publishes)
            shutil.rmtree(tmp_path / "spread" / "checkpoints" / "coordinator" / "00000")
            workers.bring_back(own, [SECOND, FIRST])
            assert ask.await_(WorkerBack).lost == (0,)
            refused(start, send, "begins a new term", "lost")
            who, begun = hello(config), Version(2, 1)
            workers.hold(
                AwaitAnchor(fragment=0, island="a", incarnation=1, term=begun.term)
            )
            anchor = b"".join(map(bytes, store.fetch(0, SECOND, None).buffers))
            whole = replace(start, tick=-1, version=SECOND)
            whole = replace(whole, length=len(anchor), total=len(anchor))
            refused(whole, lambda start: there.upload(start, anchor), "malformed")
            asked = AnchorRequest(fragment=0, term=begun.term)
            ticket = workers.completed(who, asked).ticket
            there.upload(replace(whole, ticket=ticket), anchor)
            found = ask.await_(AnchorKept)
            assert (found.replaced, found.version) == (SECOND, begun)
            published = Published(fragment=0, version=begun)
            fetch = FetchRequest(
                run_id="r",
                island="a",
                incarnation=1,
                session="s",
                fragment=0,
                want=begun,
                have=None,
                ticket=workers.completed(who, published).ticket,
            )
            with ThreadPoolExecutor(1) as beside:
                size = len(anchor)
                fetched = beside.submit(there.fetch, fetch, max_bytes=size)
                assert not fetched.done(), "it waits for the commit"
                workers.hold(Commit(fragment=0, version=begun))
                assert bytes(fetched.result(PATIENCE_S).payload) == anchor
    finally:
        workers.end(PATIENCE_S)
    assert not any(Path(f"/proc/{w.pid}").exists() for w in workers.processes())
