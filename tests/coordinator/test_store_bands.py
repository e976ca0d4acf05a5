"""A tensor that is cut into bands is held, merged, kept and restored as if whole."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from coordinator_support import PIN_S, contribution, loaded
from etils import epath
from pieces import to_pieces

from diloco_jax.checkpoint import whose
from diloco_jax.config import ConfigError, Placement
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragments import PayloadLayout, get_piece, plan_fragments
from diloco_jax.core.merging import may_cut
from diloco_jax.core.tiles import TileGrid
from diloco_jax.protocol.messages import Version

SHAPES = {"embed": (200, 16), "w": (2, 16, 16)}
AXES = {"embed": ("vocab", "embed"), "w": ("layers", "embed", "mlp")}
FRAGMENTS, MERGES = 5, 3
CUT = plan_fragments(
    SHAPES, AXES, FRAGMENTS, may_cut=partial(may_cut, rule=MERGE_RULES.find("rda"))
)
WHOLE = plan_fragments(SHAPES, AXES, 1)


@pytest.fixture
def run(run):
    return replace(run, sync=replace(run.sync, fragments=FRAGMENTS))


@pytest.fixture
def params():
    return drawn(0)


def drawn(seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=s).astype("<f4") for name, s in SHAPES.items()}


def merge_all(store, number, codec="int8", final=False):
    """Merge the deltas of two islands into every fragment; return the merges."""
    coder, parts = get_codec(codec), [contribution("a", 100), contribution("b", 300)]
    merges = []
    for fragment, pieces in enumerate(store.plan.fragments):
        layout = PayloadLayout.of(coder, pieces)
        payloads = [
            np.frombuffer(
                layout.pack([coder.encode(get_piece(drawn(seed), p)) for p in pieces]),
                np.uint8,
            )
            for seed in (10 * number, 10 * number + 1)
        ]
        version = Version(1, number)
        merges.append(store.merge(fragment, parts, payloads, final=final))
        store.commit(fragment, version, merges[-1])
    return merges


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)


def test_the_embedding_alone_is_cut():
    bands = [piece for piece in CUT.pieces if piece.bands]
    assert {piece.path for piece in bands} == {("embed",)}
    assert len({f for f, own in enumerate(CUT.fragments) if {*own} & {*bands}}) > 1


def test_merges_of_bands_are_those_of_the_whole_tensor_bit_for_bit(run, params):
    """With momentum, RDA beside them, and the mean at the end."""
    run = replace(run, sync=replace(run.sync, codec_up="f32", codec_down="f32"))
    stores = [Store(run, plan, params, PIN_S) for plan in (CUT, WHOLE)]
    assert_same(stores[0].params(), params)
    for number in range(1, MERGES + 1):
        for store in stores:
            merge_all(store, number, "f32", final=number == MERGES)
        assert_same(*(store.params() for store in stores))
    assert not np.array_equal(stores[0].params()["embed"], params["embed"])


def test_a_band_that_is_merged_leaves_the_others_alone(run, params):
    store = Store(run, CUT, params, PIN_S)
    fragment = next(f for f, own in enumerate(CUT.fragments) if own[0].bands)
    merged = merge_all(store, 1)[fragment]
    other = Store(run, CUT, params, PIN_S)
    other.commit(fragment, Version(1, 1), merged)
    mine = {piece.name for piece in CUT.fragments[fragment]}
    before, after = (to_pieces(CUT, x) for x in (params, other.params()))
    changed = {n for n, x in after.items() if not np.array_equal(x, before[n])}
    assert changed == mine


def test_islands_fetch_bands_in_the_order_of_their_own_tiles(run, params):
    store = Store(run, CUT, params, PIN_S)
    for fragment, pieces in enumerate(CUT.fragments):
        fetched = store.fetch(fragment, Version(1, 0), None)
        tiles = [TileGrid.of(p.shape).to_tiles(get_piece(params, p)) for p in pieces]
        assert b"".join(map(bytes, fetched.buffers)) == b"".join(
            x.tobytes() for x in tiles
        )


def test_snapshots_and_publishes_since_bring_bands_back(run, params, tmp_path):
    store, placement = Store(run, CUT, params, PIN_S), Placement()

    def opened(plan):
        folder = epath.Path(tmp_path / "snapshots")
        count = len(plan.fragments)
        return FragmentSnapshots(folder, placement, range(count), whose(run, "r", plan))

    merge_all(store, 1)
    again, snapshots = Store(run, CUT, None, PIN_S), opened(CUT)
    for fragment in range(FRAGMENTS):
        snapshots.save(fragment, *store.current(fragment))
    for fragment in range(FRAGMENTS):
        kept = loaded(snapshots, store, fragment, Version(1, 1))
        again.load(fragment, kept[1], Version(1, 1))
    assert again.digest() == store.digest()
    assert_same(again.params(), store.params())
    for number in (2, 3):
        for fragment, merged in enumerate(merge_all(store, number)):
            version = Version(1, number)
            again.replay(fragment, version, merged.payload, final=False)
    for fragment in range(FRAGMENTS):
        ours, theirs = (s.fetch(fragment, Version(1, 3), None) for s in (again, store))
        assert [*map(bytes, ours.buffers)] == [*map(bytes, theirs.buffers)]
    with pytest.raises(ConfigError, match="does not fit: the model's parameters"):
        opened(WHOLE).find(0, Version(1, 1))
