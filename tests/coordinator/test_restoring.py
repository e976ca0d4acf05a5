"""Fragments come back from the disk one by one, beside the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from coordinator_support import PIN_S, make_holder, merge_once
from engine_support import WAIT_S

from diloco_jax import files
from diloco_jax.coordinator.holding import fragment_snapshots
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.holder import RESTORES_AT_ONCE, StoreHolder
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.journal import DurableError
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.holding import (
    Committed,
    CycleKept,
    KeepFragment,
    MergesCompiled,
    RestoredFragment,
    RestoreFragments,
)
from diloco_jax.protocol.messages import Version
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import Busy


@pytest.fixture
def holder(make_engine) -> Iterator[StoreHolder]:
    """One whose lead does not run."""
    holder = make_engine(done=lambda: True)._holder._holder
    yield holder
    holder.close()


@pytest.fixture
def slow(monkeypatch):
    """Returns an event on which the reading of these fragments waits from now on."""
    first_reads = FragmentSnapshots._read

    def make(*fragments: int) -> threading.Event:
        comes = threading.Event()

        def read(self, path, into):
            if into is not None and int(Path(path).parent.name) in fragments:
                assert comes.wait(WAIT_S)
            return first_reads(self, path, into)

        monkeypatch.setattr(FragmentSnapshots, "_read", read)
        return comes

    return make


@pytest.fixture
def on_disk(store):
    """Writes first snapshots of a holder's fragments, and a publish of each after it;
    returns what is to be restored, and the parameters."""

    def write(holder: StoreHolder, *, merges: int = 1):
        asked = []
        for fragment in range(2):
            holder._snapshots.save_first(fragment, *store.current(fragment))
            digests = {}
            for number in range(1, merges + 1):
                version = Version(1, number)
                payload = merge_once(store, fragment, version).payload
                digests[number] = holder._publishes.write(
                    fragment, version, payload, final=False
                ).digest
            asked.append(
                Committed(
                    fragment=fragment, version=Version(1, merges), digests=digests
                )
            )
        # An anchor is what there is after a crash, as Theta too.
        anchors = [np.array(a) for f in range(2) for a in store.arrays(f)["anchor"]]
        return RestoreFragments(fragments=tuple(asked)), anchors

    return write


def assert_anchors(store: Store, anchors: list[np.ndarray]) -> None:
    """Theta of a store is what was published."""
    theta = [a for f in range(2) for a in store.arrays(f)["theta"]]
    for ours, theirs in zip(theta, anchors, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def wanted(fragment: int, version: Version) -> bulk.FetchRequest:
    return bulk.FetchRequest(
        run_id="r",
        island="a",
        incarnation=1,
        session="s",
        fragment=fragment,
        want=version,
        have=None,
    )


def nothing_since(holder: StoreHolder) -> RestoreFragments:
    """Writes a first snapshot of each fragment, which is what is committed."""
    for fragment in range(2):
        holder._snapshots.save_first(fragment, *holder.store.current(fragment))
    committed = [Committed(fragment=f, version=Version(), digests={}) for f in range(2)]
    return RestoreFragments(fragments=tuple(committed))


def kinds(tmp_path, *which: str) -> list[tuple[str, int]]:
    tape = read_tape(tmp_path / "tape.jsonl")
    return [(r["kind"], r["fragment"]) for r in tape if r["kind"] in which]


def test_a_fragment_is_merged_and_served_while_another_is_being_read(
    make_engine, island, slow, tmp_path
):

    def done():
        if not island.told(messages.Published):
            return False
        if not comes.is_set():
            assert holder.shown() == {"restoring": [1]}
            assert holder.digest() == "", "of all fragments, or none"
            assert holder.fetch(wanted(0, Version(1, 1))).buffers
            busy = "fragment 1 is being restored here; come again"
            with pytest.raises(Busy, match=busy):
                holder.fetch(wanted(1, Version()))
            assert holder._snapshots._unsaved(holder.store) == [0]
            found = kinds(tmp_path, "restored", "merged")
            assert found == [("restored", 0), ("merged", 0)]
            comes.set()
        return not holder.shown()

    engine = make_engine(done=done)
    holder: StoreHolder = engine._holder._holder
    asked, comes = nothing_since(holder), slow(1)
    assert not holder.restore(asked).lost
    engine.run()
    assert comes.is_set()
    assert holder.digest() == holder.store.digest()
    assert holder.fetch(wanted(1, Version())).buffers


def test_a_merge_waits_for_its_fragment_and_nothing_else_does(
    make_engine, island, slow, tmp_path
):
    """Its delta is taken in meanwhile, and an island is let in."""

    def done():
        if engine.state.fragments[0].phase == "merging" and not comes.is_set():
            assert not island.told(messages.Published)
            assert kinds(tmp_path, "compiled") == []
            comes.set()
        return island.told(messages.Published)

    engine = make_engine(done=done)
    holder: StoreHolder = engine._holder._holder
    asked, comes = nothing_since(holder), slow(0, 1)
    holder.restore(asked)
    engine.run()
    found = kinds(tmp_path, "restored", "merged")
    assert found.index(("restored", 0)) < found.index(("merged", 0))


def test_a_cycle_is_kept_of_what_was_restored_and_all_is_compiled_after_it(
    holder, slow, on_disk
):
    """As it is once it is back: later merges are not in it."""
    (asked, anchors), comes, told = on_disk(holder), slow(0, 1), []
    heard = {kind: threading.Event() for kind in (CycleKept, MergesCompiled)}

    def tell(message):
        told.append(type(message))
        if type(message) in heard:
            heard[type(message)].set()

    holder.answer(tell, tell)
    holder.restore(asked)
    holder.warm_up()
    for fragment in range(2):
        fields = {"version": Version(1, 1), "merges": 1, "tokens": 8}
        holder.hold(KeepFragment(cycle=0, fragment=fragment, **fields))
    assert not told
    comes.set()
    assert all(event.wait(WAIT_S) for event in heard.values())
    assert_anchors(holder.store, anchors)
    assert told[:2] == [RestoredFragment] * 2
    assert sorted(told[2:], key=str) == [CycleKept, MergesCompiled]
    assert RESTORES_AT_ONCE >= 2


def test_one_whose_bytes_are_damaged_ends_a_coordinator_that_has_begun(
    make_engine, island, on_disk
):
    engine = make_engine(done=lambda: False)
    holder: StoreHolder = engine._holder._holder
    asked, _ = on_disk(holder)
    path = holder._publishes.path(1, Version(1, 1))
    octets = bytearray(path.read_bytes())
    octets[-40] ^= 1
    path.write_bytes(octets)
    assert not holder.restore(asked).lost, "names and headers are as they were"
    with pytest.raises(DurableError, match=r"fragment 1, version \(1, 1\).*checksum"):
        engine.run()


def test_a_read_ends_with_the_coordinator_that_wants_it(holder, on_disk, monkeypatch):
    """Not with the snapshot, which may have gigabytes."""
    (asked, _), reads, read_into = on_disk(holder), [], files._read_into
    monkeypatch.setattr(fragment_snapshots, "READ_VALUES", 8)

    def read(file, block):
        reads.append(file.name)
        if len(reads) == 3:
            holder.close()
        return read_into(file, block)

    monkeypatch.setattr(files, "_read_into", read)
    assert holder._bring_back(asked.fragments[1]) is None
    assert len(reads) == 3


@pytest.mark.parametrize("gone", ["snapshot", "publish"])
def test_one_whose_files_are_gone_is_known_before_anyone_is_let_in(
    holder, on_disk, tmp_path, gone
):
    asked, _ = on_disk(holder)
    (path,) = tmp_path.rglob(f"00001/*.{gone}")
    path.unlink()
    (lost,) = holder.restore(asked).lost
    assert lost.fragment == 1
    assert "fragment 1" in lost.why


def test_a_kill_while_fragments_come_back_changes_nothing_on_the_disk(
    holder, run, slow, on_disk, tmp_path
):
    asked, anchors = on_disk(holder, merges=3)
    before = {p: p.read_bytes() for p in tmp_path.rglob("00*/*")}
    comes = slow(1)
    holder.restore(asked)  # It stays as it is: nothing is told, nothing is ended.
    assert {p: p.read_bytes() for p in tmp_path.rglob("00*/*")} == before
    again = make_holder(Store(run, holder.store.plan, None, PIN_S), tmp_path)
    comes.set()
    found = again.restore(asked, whole=True)
    assert [f.version for f in found.fragments] == [Version(1, 3)] * 2
    assert [f.snapshot for f in found.fragments] == [Version()] * 2
    assert_anchors(again.store, anchors)
    again.close()


def test_the_result_of_a_run_has_those_that_nobody_waited_for(
    holder, slow, on_disk, monkeypatch
):
    """Each is told of before a snapshot of it is written: replay begins there."""
    asked, anchors = on_disk(holder)
    comes, order = slow(0, 1), []
    monkeypatch.setattr(holder, "_tell", lambda found: order.append(found.fragment))
    write_last = holder._snapshots.write_last

    def written(*arguments):
        order.append("snapshots")
        write_last(*arguments)

    monkeypatch.setattr(holder._snapshots, "write_last", written)
    holder._restorer.submit(comes.wait, WAIT_S)
    holder.restore(asked)
    holder._closing.set()
    comes.set()
    holder.close()
    assert holder.save_all(None)
    assert order == [0, 1, "snapshots"]
    assert holder.digest() == holder.store.digest()
    assert_anchors(holder.store, anchors)
