"""The contract of every merge rule."""

import weakref
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_members import brief, names
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import merge_deltas

from diloco_jax.core import merging, tiles
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.contracts import merges_bands_alike
from diloco_jax.core.families import MERGE_RULES, MergeRule
from diloco_jax.core.fragments import Piece
from diloco_jax.core.merge_rules import MEAN
from diloco_jax.core.merging import Encoded, merge_piece, rule_for, start

SHAPES = [(6, 5), (7,), (2, 3, 4)]
NAMES = names(MERGE_RULES, "merge")
FOLDS = [name for name in NAMES if MERGE_RULES.find(name).needs == "fold"]
weights_of = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=5)
few = settings(max_examples=15, deadline=None)


@pytest.fixture(params=NAMES, ids=brief)
def rule(request: pytest.FixtureRequest) -> MergeRule:
    """Every member."""
    return MERGE_RULES.find(request.param)


def drawn(seed: int, count: int, shape: tuple[int, ...] = (6, 5)) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list(rng.standard_normal((count, *shape)).astype(np.float32))


def distance(a: jax.Array, b: jax.Array) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_merged_delta_has_the_shape_of_the_deltas(rule, shape) -> None:
    merged = merge_deltas(drawn(0, 4, shape), [1, 2, 3, 4], rule)
    assert (merged.shape, merged.dtype) == (shape, jnp.float32)
    assert np.isfinite(merged).all()


@given(st.integers(0, 1000), weights_of, st.randoms(use_true_random=False))
@few
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_the_order_of_islands_does_not_matter(name, seed, weights, random) -> None:
    rule = MERGE_RULES.find(name)
    pairs = list(zip(drawn(seed, len(weights)), weights, strict=True))
    first = merge_deltas(*zip(*pairs, strict=True), rule)
    again = merge_deltas(*zip(*pairs, strict=True), rule)
    np.testing.assert_array_equal(first, again)
    random.shuffle(pairs)
    assert distance(merge_deltas(*zip(*pairs, strict=True), rule), first) < 1e-4


@given(st.integers(0, 1000), weights_of, st.floats(1e-6, 1e6))
@few
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_only_ratios_of_weights_matter(name, seed, weights, factor) -> None:
    rule, deltas = MERGE_RULES.find(name), drawn(seed, len(weights))
    one = merge_deltas(deltas, weights, rule)
    other = merge_deltas(deltas, [w * factor for w in weights], rule)
    assert distance(other, one) < 1e-4


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_equal_deltas_merge_to_themselves_where_the_rule_says_so(rule, scale) -> None:
    delta = scale * drawn(0, 1)[0]
    off = distance(merge_deltas([delta] * 3, [1, 5, 2], rule), delta)
    assert (off < 1e-5) == rule.keeps_equal


@given(st.integers(0, 1000), weights_of, st.floats(0.01, 1.0))
@few
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_a_share_of_the_work_goes_as_far_as_its_share(
    name, seed, weights, share
) -> None:
    rule, deltas = MERGE_RULES.find(name), drawn(seed, len(weights))
    whole = merge_deltas(deltas, weights, rule)
    part = merge_deltas(deltas, weights, rule, share)
    assert distance(part, share * whole) < 1e-4


def test_deltas_of_zero_move_nothing(rule) -> None:
    nothing = [np.zeros((6, 5), np.float32)] * 2
    np.testing.assert_array_equal(merge_deltas(nothing, [1, 1], rule), 0)


def test_rules_that_say_so_keep_the_length_and_others_do_not(rule) -> None:
    """The deltas are orthogonal."""
    deltas = list(np.eye(16, dtype=np.float32).reshape(16, 4, 4)[:8])
    length = float(jnp.linalg.norm(merge_deltas(deltas, [1] * 8, rule)))
    assert (length == pytest.approx(1, rel=1e-4)) == rule.keeps_length


def test_rules_that_say_so_merge_bands_as_the_whole_and_others_do_not(rule) -> None:
    assert merges_bands_alike(rule) == rule.by_element


def test_the_flush_and_embeddings_are_means_unless_the_rule_says_otherwise(
    rule,
) -> None:
    for embedding in (True, False):
        piece = Piece(("w",), -1, (6, 5), embedding)
        own = embedding and rule.embeddings_by_mean
        assert rule_for(piece, rule) is (MEAN if own else rule)
        flushed = own or rule.flush_by_mean
        assert rule_for(piece, rule, final=True) is (MEAN if flushed else rule)


def test_encoded_deltas_are_merged_as_decoded_ones_are(rule) -> None:
    codec, shape = get_codec("int8"), (40, 100)
    encoded = [np.asarray(codec.encode(d)) for d in drawn(1, 3, shape)]
    plain = Encoded.of([codec.decode(e, shape) for e in encoded])
    state = start(rule, shape)
    one = merge_piece(rule, Encoded(codec, shape, encoded), [1, 2, 3], 1.0, state)
    other = merge_piece(rule, plain, [1, 2, 3], 1.0, state)
    np.testing.assert_array_equal(one.delta, other.delta)
    assert one.square == other.square
    exact = np.sum(np.square(np.asarray(one.delta, np.float64)))
    assert one.square == pytest.approx(exact, rel=1e-6)


def test_blocks_of_tiles_do_not_change_a_merge(rule, monkeypatch) -> None:
    deltas, shape = drawn(2, 3, (64, 128)), (64, 128)
    state = start(rule, shape)
    whole = merge_piece(rule, Encoded.of(deltas), [1, 2, 3], 1.0, state).delta
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", 1)
    cut = merge_piece(rule, Encoded.of(deltas), [1, 2, 3], 1.0, state).delta
    np.testing.assert_array_equal(cut, whole)


def test_a_state_keeps_its_structure_and_survives_what_a_crash_does(rule) -> None:
    shape = (6, 5)
    state = start(rule, shape)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for seed in range(3):
        state = merge_piece(rule, Encoded.of(drawn(seed, 2)), [1, 2], 1.0, state).state
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == like
        state = merging.recovered(rule, state, jnp.asarray(drawn(9, 1)[0]))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == like
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(state)]
    assert merging.state_bytes(rule, shape) == sum(sizes)


class Counted(Sequence):
    """`Deltas` that know how many of them are alive at a time."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays, self.alive, self.most = arrays, 0, 0
        self.shape = arrays[0].shape

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[np.ndarray]:
        raise AssertionError("all are asked for at once")

    def __getitem__(self, island: int) -> np.ndarray:
        made = self._arrays[island].copy()
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self._freed)
        return made

    def _freed(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("name", FOLDS, ids=brief)
def test_a_fold_holds_no_more_deltas_the_more_islands_there_are(name: str) -> None:
    rule = MERGE_RULES.find(name)
    for islands in (3, 9):
        deltas = Counted(drawn(3, islands))
        merge_piece(rule, deltas, [1.0] * islands, 1.0, start(rule, (6, 5)))
        assert deltas.most <= 2
