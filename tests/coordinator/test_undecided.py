"""Snapshots wait of what a lead has committed and not shown: it may never have been."""

from __future__ import annotations

import queue
import time

import pytest
from coordinator_support import AXES, PIN_S, SHAPES
from engine_support import WAIT_S
from etils import epath

from diloco_jax.checkpoint import whose
from diloco_jax.config import Placement
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.holding.inbox import Inbox
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.holding.rooms import Rooms
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.snapshots import versions
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol.holding import (
    Commit,
    Committed,
    Drop,
    Merge,
    MergePrepared,
    RestoreFragments,
)
from diloco_jax.protocol.values import Contribution, DeltaKey, Version
from diloco_jax.wire import bulk

BEFORE, NEXT = Version(1, 0), Version(1, 1)
PLACEMENT = Placement(snapshots_kept=1)
OTHER = Drop(delta=DeltaKey("a", 1, 1, 9))
"""Any message of a lead that serves."""


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path / "snapshots")


@pytest.fixture
def make(tmp_path, run, params, folder):
    """A worker's holder with one snapshot of each fragment, and what it says."""

    def made():
        store = Store(run, plan_fragments(SHAPES, AXES, 2), params, PIN_S)
        said = queue.SimpleQueue()
        holder = StoreHolder(
            store,
            Inbox(store.layouts_up, Rooms(1 << 20)),
            Publishes(tmp_path / "publishes"),
            FragmentSnapshots(folder, PLACEMENT, range(2), whose(run, "r", store.plan)),
            KeptCycles(tmp_path, 2, {}, store.plan.sizes),
            write_within_s=WAIT_S,
        )
        holder.answer(said.put, said.put)
        holders.append(holder)
        return holder, said

    holders = []
    yield made
    for holder in holders:
        holder.close()


def prepared(holder, said, tick):
    """Merge a delta of zeros into the fragment's next version."""
    layout = holder.store.layouts_up[0]
    start = bulk.UploadStart(
        run_id="r",
        island="a",
        incarnation=1,
        session="s",
        fragment=0,
        tick=tick,
        offset=0,
        length=layout.total_bytes,
        total=layout.total_bytes,
    )
    place = holder.upload_begin(start)
    place[:] = bytes(layout.total_bytes)
    assert holder.upload_end(start, place)
    contribution = Contribution(
        island="a", incarnation=1, tick=tick, start=0, end=2, tokens=16, base=BEFORE
    )
    merge = Merge(
        fragment=0, version=NEXT, contributions=(contribution,), share=1.0, final=False
    )
    holder.hold(merge)
    while not isinstance(message := said.get(timeout=WAIT_S), MergePrepared):
        assert not isinstance(message, BaseException), message


def lead_with(version):
    """First message of a lead whose log has this version of fragment 0."""
    at = {0: version, 1: BEFORE}
    found = [Committed(fragment=f, version=v, digests={}) for f, v in at.items()]
    return RestoreFragments(fragments=tuple(found))


def write_what_is_due(holder):
    holder.keep_house(time.monotonic() + 1e6)
    assert holder.wait(lambda: WAIT_S)


def test_one_that_took_over_without_it_finds_the_version_before(make, folder):
    """The lead before had started again, and died before it served."""
    holder, said = make()
    holder.begin()
    prepared(holder, said, 1)
    assert not holder.take_over(lead_with(NEXT)).lost
    assert holder.store.versions()[0] == NEXT
    write_what_is_due(holder)
    assert versions(folder, 0) == [BEFORE]

    another, said = make()
    assert not another.restore(lead_with(BEFORE)).lost
    assert another.store.versions()[0] == BEFORE
    prepared(another, said, 2)
    another.hold(Commit(fragment=0, version=NEXT))
    write_what_is_due(another)
    assert versions(folder, 0) == [NEXT]


def test_a_process_that_restored_it_waits_likewise(make, folder):
    holder, said = make()
    holder.begin()
    prepared(holder, said, 1)
    another, _ = make()
    assert not another.restore(lead_with(NEXT)).lost
    write_what_is_due(another)
    assert versions(folder, 0) == [BEFORE]


def test_it_is_written_once_the_lead_serves(make, folder):
    holder, said = make()
    holder.begin()
    prepared(holder, said, 1)
    holder.take_over(lead_with(NEXT))
    holder.hold(OTHER)
    write_what_is_due(holder)
    assert versions(folder, 0) == [NEXT]
