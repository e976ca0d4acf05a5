"""Merges go through core/, stay invisible until committed, and survive a crash. Memory
is used again only once nobody can read it.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coordinator_support import (
    AXES,
    PIN_S,
    SHAPES,
    arrays,
    contribution,
    encoded_delta,
    load,
    loaded,
    merge_once,
    own_order,
)
from etils import epath
from pieces import merge_deltas, publish, to_pieces

from diloco_jax import checkpoint
from diloco_jax.config import Placement
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.store import CACHE_LINE, Spares, Store
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragment_merge import is_fit
from diloco_jax.core.fragments import PayloadLayout, get_piece, plan_fragments
from diloco_jax.core.merging import RDA, may_cut, rule_for
from diloco_jax.core.outer import make_outer, outer_step
from diloco_jax.core.tiles import TileGrid
from diloco_jax.protocol.messages import Version


def test_a_merge_is_the_oracles_bit_for_bit(store, run, params):
    pieces = store.plan.fragments[0]
    given = to_pieces(store.plan, params)
    theta = tuple(jnp.asarray(given[p.name]) for p in pieces)
    (one, da), (two, db) = (encoded_delta(store, 0, s) for s in (1, 2))
    merged = store.merge(
        0,
        [contribution("a", 100), contribution("b", 300)],
        [one, two],
        final=False,
    )
    expected = tuple(
        merge_deltas([a, b], [100.0, 300.0], rule_for(p, RDA))
        for a, b, p in zip(da, db, pieces, strict=True)
    )
    tx = make_outer(outer_settings(run))
    moved, _ = outer_step(tx, theta, tx.init(theta), expected)
    for ours, oracle, old, anchor in zip(
        own_order(store, 0, merged.state.theta),
        moved,
        theta,
        own_order(store, 0, merged.state.anchor),
        strict=True,
    ):
        assert np.array_equal(ours, oracle)
        assert np.array_equal(anchor, publish(get_codec("int8"), oracle, old)[1])


def test_a_merge_is_invisible_until_it_is_committed(store):
    before = store.params()
    payload, _ = encoded_delta(store, 0, 1)
    merged = store.merge(0, [contribution("a", 1)], [payload], final=False)
    assert np.array_equal(before["embed"], store.params()["embed"])
    assert store.fetch(0, Version(1, 0), None).version == Version(1, 0)
    store.commit(0, Version(1, 1), merged)
    changed = to_pieces(store.plan, store.params())
    old = to_pieces(store.plan, before)
    assert all(
        not np.array_equal(changed[p.name], old[p.name])
        for p in store.plan.fragments[0]
    )


def test_a_snapshot_brings_everything_back(run, params, store):
    merge_once(store, 0, Version(1, 1))
    saved = arrays(store)
    kept = jax.tree.map(np.array, saved)
    other = Store(run, plan_fragments(SHAPES, AXES, 2), None, PIN_S)
    load(other, saved, [Version(1, 1), Version(1, 0)])
    merge_once(store, 0, Version(1, 2))
    merge_once(other, 0, Version(1, 2))
    assert store.digest() == other.digest()
    jax.tree.map(np.testing.assert_array_equal, saved, kept)


MEMBERS = Path(__file__).parents[2] / "benchmarks" / "members"
HELOCO = f"{MEMBERS}/merge/heloco.py:heloco"


@pytest.mark.parametrize("rule", [HELOCO, f"{MEMBERS}/merge/isoloco.py:isoloco"])
def test_a_rule_that_is_not_bundled_is_in_snapshots_with_what_it_keeps(
    run, params, rule, tmp_path
):
    run = replace(run, sync=replace(run.sync, merge=rule, fragments=3))
    plan = plan_fragments(SHAPES, AXES, 3)  # The embedding, which keeps nothing, alone.
    store = Store(run, plan, params, PIN_S)
    folder = epath.Path(tmp_path / "snapshots")
    whose = checkpoint.whose(run, "r", plan)
    snapshots = FragmentSnapshots(folder, Placement(), range(3), whose)
    for fragment in range(3):
        merge_once(store, fragment, Version(1, 1))
        snapshots.save(fragment, Version(), store.arrays(fragment))
    other = Store(run, plan, params, PIN_S)
    saved = [loaded(snapshots, other, fragment, Version())[1] for fragment in range(3)]
    load(other, saved, [Version(1, 1)] * 3)
    fresh = Store(run, plan, params, PIN_S)
    forgotten = [
        {**own, "merge": first.get("merge", [])}
        for own, first in zip(saved, arrays(fresh), strict=True)
    ]
    load(fresh, forgotten, [Version(1, 1)] * 3)
    differ = []
    for fragment in range(3):
        for each in (store, other, fresh):
            merge_once(each, fragment, Version(1, 2), seeds=(5, 6))
        one, two, three = (s.digest_of(fragment) for s in (store, other, fresh))
        assert one == two
        differ.append(one != three)
    # Without what it kept, a rule with a state merges otherwise.
    assert any(differ) == (rule == HELOCO)


def test_a_merge_is_compared_with_the_last_one(store):
    measures = [
        merge_once(store, 0, Version(1, number), seeds=seeds).measures
        for number, seeds in ((1, (1, 2)), (2, (1, 2)), (3, (8, 9)))
    ]
    assert measures[0].cosine_to_last is None
    assert measures[1].cosine_to_last == pytest.approx(1, abs=1e-5)
    assert abs(measures[2].cosine_to_last) < 0.9


@pytest.mark.parametrize("scale", [float("inf"), 1e30, 1e19, 3e17])
def test_deltas_that_are_not_finite_or_too_long_are_seen(store, scale):
    payload, _ = encoded_delta(store, 0, 1)
    assert is_fit(store.squares(0, payload))
    broken, _ = encoded_delta(store, 0, 1, scale=scale)
    assert not is_fit(store.squares(0, broken))


def test_what_is_let_in_leaves_the_parameters_finite(store):
    largest, _ = encoded_delta(store, 0, 1, scale=1e16)
    assert is_fit(store.squares(0, largest))
    usual, _ = encoded_delta(store, 0, 1)
    for number in range(1, 9):
        payload = largest if number == 6 else usual
        part = contribution("a", 100)
        version = Version(1, number)
        merged = store.merge(0, [part], [payload], final=False)
        store.commit(0, version, merged)
    for array in jax.tree.leaves(arrays(store)):
        assert np.isfinite(np.asarray(array)).all()


def test_no_merge_compiles_after_the_warm_up(store, caplog):
    jax.clear_caches()
    for fragment in range(len(store.plan.fragments)):
        store.warm_up(fragment, lambda: False)
    payloads = {
        fragment: [encoded_delta(store, fragment, seed)[0] for seed in (1, 2)]
        for fragment in range(len(store.plan.fragments))
    }
    parts = [contribution("a", 100), contribution("b", 200)]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for fragment, given in payloads.items():
            assert is_fit(store.squares(fragment, given[0]))
            for final in (False, True):
                store.merge(fragment, parts, given, final=final)
    assert [r.message for r in caplog.records if "Compiling" in r.message] == []


def test_a_warm_up_ends_when_the_run_does(store, monkeypatch):
    fragments = []
    monkeypatch.setattr(store, "merge", lambda f, *a, **k: fragments.append(f))
    for fragment in range(len(store.plan.fragments)):
        store.warm_up(fragment, lambda: len(fragments) > 0)
    assert set(fragments) == {0}


def test_a_cap_on_weights_holds_in_every_merge(run, params):
    """The second island has twice the tokens of the first."""

    def merged(**sync):
        capped = replace(run, sync=replace(run.sync, **sync))
        store = Store(capped, plan_fragments(SHAPES, AXES, 2), params, PIN_S)
        first = merge_once(store, 0, Version(1, 1)).payload
        last = merge_once(store, 0, Version(1, 2), seeds=(3, 4), final=True).payload
        return bytes(first), bytes(last)

    plain, capped = merged(), merged(weight_cap=0.5)
    uniform = merged(weighting="uniform")
    assert merged(weight_cap=0.9) == plain
    assert capped[0] == uniform[0] != plain[0]
    assert capped[1] != uniform[1], "the flush weighs by tokens, up to the cap"


def place(array: np.ndarray) -> int:
    return array.ctypes.data


def test_an_array_comes_back_once_it_is_gone_and_not_before() -> None:
    spares = Spares()
    first = spares.array((8, 16), np.float32)
    second = spares.array((8, 16), np.float32)
    at = place(first)
    assert at != place(second)
    assert at % CACHE_LINE == 0
    view, buffer = first[2:4], second.data
    del first, second
    assert spares.array((8, 16), np.float32) is not None, "view and buffer are read"
    del view
    assert place(spares.array((16, 8), np.float32)) == at, "by size, not by shape"
    assert buffer.nbytes == 512


BANDED = {"embed": (200, 16), "w": (2, 16, 16)}
BANDED_AXES = {"embed": ("vocab", "embed"), "w": ("layers", "embed", "mlp")}


def test_a_tensor_in_bands_is_merged_and_brought_back_as_if_whole(run) -> None:
    """Its merges, and the mean at the end, are those of the whole bit for bit."""

    def drawn(seed):
        random = np.random.default_rng(seed)
        return {n: random.normal(size=s).astype("<f4") for n, s in BANDED.items()}

    coder, parts = get_codec("f32"), [contribution("a", 100), contribution("b", 300)]
    sync = replace(run.sync, fragments=5, codec_up="f32", codec_down="f32")
    run = replace(run, sync=sync)
    cuts = partial(may_cut, rule=MERGE_RULES.find("rda"))
    plan = plan_fragments(BANDED, BANDED_AXES, 5, may_cut=cuts)
    assert sum(any(piece.bands for piece in own) for own in plan.fragments) > 1
    cut = Store(run, plan, drawn(0), PIN_S)
    whole = Store(run, plan_fragments(BANDED, BANDED_AXES, 1), drawn(0), PIN_S)
    again = Store(run, plan, None, PIN_S)
    load(again, arrays(cut), [Version()] * 5)
    for fragment, pieces in enumerate(plan.fragments):
        values = [(TileGrid.of(p.shape), get_piece(drawn(0), p)) for p in pieces]
        tiles = [np.asarray(grid.to_tiles(value)).tobytes() for grid, value in values]
        fetched = cut.fetch(fragment, Version(), None).buffers
        assert b"".join(map(bytes, fetched)) == b"".join(tiles), "as islands have them"
    for version, final in ((Version(1, 1), False), (Version(1, 2), True)):
        for store in (cut, whole):
            for fragment, pieces in enumerate(store.plan.fragments):
                layout, payloads = PayloadLayout.of(coder, pieces), []
                for seed in (10 * version.number, 10 * version.number + 1):
                    delta = [coder.encode(get_piece(drawn(seed), p)) for p in pieces]
                    payloads.append(np.frombuffer(layout.pack(delta), np.uint8))
                merged = store.merge(fragment, parts, payloads, final=final)
                store.commit(fragment, version, merged)
                if store is cut:
                    again.replay(fragment, version, merged.payload, final=final)
    for name, value in drawn(0).items():
        assert not np.array_equal(cut.params()[name], value)
        np.testing.assert_array_equal(cut.params()[name], whole.params()[name])
    for fragment in range(5):
        ours, theirs = (s.fetch(fragment, Version(1, 2), None) for s in (again, cut))
        assert [*map(bytes, ours.buffers)] == [*map(bytes, theirs.buffers)]
