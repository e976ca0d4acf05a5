"""Fetches from the store: publishes that lead on, and anchors in full."""

import gc
import weakref
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from coordinator_support import PIN_S, arrays, load, merge_once
from pieces import to_pieces

from diloco_jax.coordinator.holding.store import (
    PINNED_VERSIONS,
    RETAINED_PUBLISHES,
    Store,
)
from diloco_jax.core.changes import apply_publish
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import Box, PayloadLayout, plan_fragments
from diloco_jax.core.tiles import TileGrid, sha256_arrays
from diloco_jax.protocol.messages import Version
from diloco_jax.wire.bulk import part_name
from diloco_jax.wire.errors import VersionGone


def test_missed_publishes_come_as_a_chain_and_lead_to_the_same_anchor(store, params):
    for number in (1, 2, 3):
        merge_once(store, 0, Version(1, number), seeds=(number, number + 10))
    source = store.fetch(0, Version(1, 3), Version(1, 1))
    assert (source.full, source.count) == (False, 2)
    layout = PayloadLayout.of(get_codec("int8"), store.plan.fragments[0])
    assert source.total == 2 * layout.total_bytes
    full = store.fetch(0, Version(1, 3), None)
    first = store.fetch(0, Version(1, 3), Version(1, 0))
    given = to_pieces(store.plan, params)
    anchors = [jnp.asarray(given[p.name]) for p in store.plan.fragments[0]]
    for buffer in first.buffers:
        arrays = layout.unpack(bytes(buffer))
        anchors = [
            apply_publish(get_codec("int8"), a, jnp.asarray(x))
            for a, x in zip(anchors, arrays, strict=True)
        ]
    expected = b"".join(
        TileGrid.of(a.shape).to_tiles(np.asarray(a)).tobytes() for a in anchors
    )
    assert b"".join(bytes(b) for b in full.buffers) == expected


def test_who_missed_more_than_is_retained_gets_the_anchor_in_full(store):
    for number in range(1, RETAINED_PUBLISHES + 3):
        merge_once(store, 0, Version(1, number))
    last = Version(1, RETAINED_PUBLISHES + 2)
    assert store.fetch(0, last, Version(1, 0)).full
    assert not store.fetch(0, last, Version(1, last.number - 1)).full


def test_no_chain_leads_from_one_term_into_another(store):
    """The numbers of both look like neighbours."""
    load(store, arrays(store), [Version(2, 5), Version(1, 0)])
    merge_once(store, 0, Version(2, 6))
    assert store.fetch(0, Version(2, 6), Version(1, 5)).full
    assert not store.fetch(0, Version(2, 6), Version(2, 5)).full


def test_a_host_gets_its_tiles_of_the_anchor(run, params, monkeypatch):
    monkeypatch.setattr("diloco_jax.wire.bulk.BLOCK_BYTES", 20_000)
    axes, shape = {"w": ("embed", "mlp")}, (256, 128)
    weights = np.random.default_rng(0).normal(size=shape).astype("<f4")
    plan = plan_fragments({"w": shape}, axes, 1)
    store = Store(run, plan, {"w": weights}, PIN_S)
    ((rows, columns),) = [
        p.encoded_shape[:-1]
        for p in PayloadLayout.of(get_codec("int8"), plan.fragments[0]).placed
    ]
    part = (Box(0, (0, columns // 2), (rows, columns)), Box(0, (0, 0), (1, columns)))
    source = store.fetch(0, Version(1, 0), None, part)
    assert source.full
    tiles = TileGrid.of(shape).split(weights)
    expected = tiles[:, columns // 2 :].tobytes() + tiles[:1].tobytes()
    assert b"".join(bytes(buffer) for buffer in source.buffers) == expected
    assert source.total == len(expected)
    scattered = [b for b in source.buffers if not b.c_contiguous]
    assert max(buffer.nbytes for buffer in scattered) <= 20_000
    with pytest.raises(ValueError, match="is not in a fragment of 1 pieces"):
        store.fetch(0, Version(1, 0), None, (Box(1, (0, 0), (1, 1)),))


def test_a_join_goes_on_fetching_the_version_that_it_began_with(store):
    begun = b"".join(bytes(b) for b in store.fetch(0, Version(1, 0), None).buffers)
    merge_once(store, 0, Version(1, 1))
    again = b"".join(bytes(b) for b in store.fetch(0, Version(1, 0), None).buffers)
    assert begun == again
    merge_once(store, 1, Version(1, 1))
    with pytest.raises(VersionGone, match="fetch this fragment again"):
        store.fetch(1, Version(1, 0), None)


def test_of_too_many_versions_that_are_fetched_the_oldest_goes(store):
    for number in range(PINNED_VERSIONS + 1):
        store.fetch(0, Version(1, number), None)
        merge_once(store, 0, Version(1, number + 1))
    with pytest.raises(VersionGone):
        store.fetch(0, Version(1, 0), None)
    for number in range(1, PINNED_VERSIONS + 1):
        assert store.fetch(0, Version(1, number), None).full


def test_an_anchor_is_kept_while_it_is_fetched_and_a_while_longer(store, monkeypatch):
    """However long that takes; then it is freed."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("diloco_jax.coordinator.holding.store.time", clock)

    def later(seconds: float) -> None:
        gc.collect()
        now[0] += seconds
        store.expire_pins()

    slow, quick = (store.fetch(0, Version(1, 0), None) for _ in range(2))
    pinned = weakref.ref(store.arrays(0)["anchor"][0])
    merge_once(store, 0, Version(1, 1))
    del quick
    later(10 * PIN_S)
    assert store.fetch(0, Version(1, 0), None).full, "another stripe is under way"
    del slow
    later(0.9 * PIN_S)
    assert store.fetch(0, Version(1, 0), None).full, "a stripe may have broken"
    later(1.1 * PIN_S)
    gc.collect()
    assert pinned() is None
    with pytest.raises(VersionGone):
        store.fetch(0, Version(1, 0), None)


def test_publishes_on_the_disk_take_no_memory_and_are_served(store):
    merged = merge_once(store, 0, Version(1, 1))
    wanted, held = bytes(merged.payload), weakref.ref(merged.payload.obj)
    del merged
    store.put_aside(0, lambda fragment, version: None)
    assert held() is not None, "its file is gone"
    store.put_aside(0, lambda fragment, version: memoryview(wanted))
    gc.collect()
    assert held() is None
    merge_once(store, 0, Version(1, 2))
    source = store.fetch(0, Version(1, 2), Version(1, 0))
    assert (source.full, source.count) == (False, 2)
    served = b"".join(bytes(buffer) for buffer in source.buffers)
    assert served.startswith(wanted)


def test_whatever_an_island_asks_for_few_parts_are_hashed(store):
    merged = merge_once(store, 0, Version(1, 1))
    layout = store._merges[0].layout_down
    whole = layout.boxes(())
    halves = [whole[:1], whole[1:]]
    assert store.stripes(0, merged.payload) == {}

    for part in halves:
        store.note_part(0, "a", part, 2)
    assert set(store.stripes(0, merged.payload)) == set(map(part_name, halves))

    with pytest.raises(ValueError, match="a part of 2000 boxes"):
        store.note_part(0, "b", whole * 1000, 1)  # Hashed a thousand times.
    assert "b" not in store._parts[0]
    nothing = whole[0]._replace(stop=whole[0].start)
    store.note_part(0, "b", (nothing,), 1)
    with pytest.raises(ValueError, match="2 boxes and 0 bytes"):
        store.note_part(0, "b", (nothing,) * 2, 1)
    assert len(store._parts[0]["b"]) == 1

    store.note_part(0, "a", (), 2)  # It has one host now.
    found = store.stripes(0, merged.payload)
    assert found[""] == sha256_arrays([np.frombuffer(merged.payload, np.uint8)])
    assert list(store._parts[0]["a"]) == [()]
