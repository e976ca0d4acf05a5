"""Merge rules against float64 references, and weights; then the contract of every merge
rule and weighting."""

from __future__ import annotations

import itertools
import math

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
from diloco_jax.core.families import MERGE_RULES, WEIGHTINGS, MergeRule
from diloco_jax.core.fragments import Piece
from diloco_jax.core.merging import (
    MEAN,
    RDA,
    TRIMMED_MEAN,
    Encoded,
    capped,
    comparators,
    merge_piece,
    rule_for,
    start,
    weight,
)

SHAPE = (6, 5)
NAMES = names(MERGE_RULES, "merge")
weights_of = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=5)
few = settings(max_examples=15, deadline=None)


def drawn(seed: int, count: int, shape: tuple[int, ...] = SHAPE) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list(rng.standard_normal((count, *shape)).astype(np.float32))


def unlike(seed: int, count: int) -> list[np.ndarray]:
    """Deltas of very different lengths."""
    scales = 10.0 ** np.random.default_rng(seed).uniform(-6, 3, count)
    return [d * np.float32(s) for d, s in zip(drawn(seed, count), scales, strict=True)]


def distance(a: np.ndarray | jax.Array, b: np.ndarray | jax.Array) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


@given(st.integers(0, 1000), weights_of)
@few
def test_mean_and_rda_are_the_formulas(seed: int, weights: list[float]) -> None:
    deltas = unlike(seed, len(weights))
    stacked = np.stack(deltas).astype(np.float64)
    w = np.array(weights) / np.sum(weights)
    mean = np.einsum("m,mij->ij", w, stacked)
    assert distance(merge_deltas(deltas, weights, MEAN), mean) < 1e-5
    norms = np.linalg.norm(stacked.reshape(len(w), -1), axis=1)
    direction = np.einsum("m,mij->ij", w / norms, stacked)
    rda = w @ norms * direction / np.linalg.norm(direction)
    assert distance(merge_deltas(deltas, weights, RDA), rda) < 1e-5


def test_rda_where_directions_cancel_or_are_none_is_the_mean() -> None:
    (delta,) = unlike(0, 1)
    for share in (0.5, 1.0):
        merged = merge_deltas([delta, -3 * delta], [1, 1], RDA, share)
        assert distance(merged, -share * delta) < 1e-6
    merged = merge_deltas([np.zeros_like(delta), delta], [3, 1], RDA)
    assert distance(merged, delta / 4) < 1e-6, "it shortens, and does not turn"
    almost = (-delta * np.float32(1 + 1e-6)).astype(np.float32)
    merged = merge_deltas([delta, almost], [1, 1], RDA)
    assert np.linalg.norm(merged) < 1e-5 * np.linalg.norm(delta), "that is rounding"


def test_norms_of_large_pieces_are_accurate() -> None:
    x = np.random.default_rng(0).random(4_000_000, np.float32) + 1
    exact = np.sqrt(np.sum(np.square(x, dtype=np.float64)))
    (square,) = Encoded.of([x]).squares
    assert abs(np.sqrt(square) / exact - 1) < 1e-12


@pytest.mark.parametrize(
    ("deltas", "weights", "share", "message"),
    [
        (1, [1.0, 2.0], 1.0, "1 deltas and 2 weights"),
        (0, [], 1.0, "0 deltas and 0 weights"),
        (2, [1.0, -1.0], 1.0, "must be finite, not negative"),
        (2, [0.0, 0.0], 1.0, "not all zero"),
        (2, [1.0, float("nan")], 1.0, "must be finite"),
        (1, [float("inf")], 1.0, "must be finite"),
        *((1, [1.0], share, "share") for share in (0.0, -0.1, 1.1, float("nan"))),
    ],
)
def test_unfit_weights_are_refused(
    deltas: int, weights: list[float], share: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        merge_deltas(drawn(0, deltas), weights, RDA, share)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no merge rule 'median'"):
        MERGE_RULES.find("median")
    with pytest.raises(ValueError, match="no weighting 'loss'"):
        WEIGHTINGS.find("loss")


def test_a_clipped_mean_shortens_what_is_longer_than_most() -> None:
    rule, x, y = MERGE_RULES.find("clipped_mean"), np.zeros(2), np.zeros(2)
    x[0], y[1] = 1, 1
    deltas = [v.astype(np.float32) for v in (x, 3 * x, 1e6 * y)]
    for weights, expected in (([1.0, 1.0, 2.0], [1, 1.5]), ([1.0] * 3, [4 / 3, 1])):
        merged = merge_deltas(deltas, weights, rule)
        np.testing.assert_allclose(merged, expected, rtol=1e-6)


@pytest.mark.parametrize("wrong", [1e6, -1.0])
def test_a_trimmed_mean_of_eight_lies_between_the_honest_six(wrong: float) -> None:
    honest = [np.full(SHAPE, 1 + i / 10, np.float32) for i in range(6)]
    lies = [np.full(SHAPE, wrong, np.float32)] * 2
    merged = merge_deltas([*lies, *honest], [1.0] * 8, TRIMMED_MEAN)
    assert 1.0 <= merged.min() <= merged.max() <= 1.5


def test_rules_against_liars_are_for_all_pieces_and_the_last_merge() -> None:
    embedding = Piece(("e",), -1, SHAPE, True)
    for name in ("trimmed_mean", "clipped_mean"):
        rule = MERGE_RULES.find(name)
        assert rule_for(embedding, rule, final=True) is rule


@given(st.lists(st.integers(0, 5) | st.integers(), max_size=130))
def test_comparators_sort_any_number_of_places(values: list[int]) -> None:
    rows = list(values)
    for low, high in comparators(len(rows)):
        assert low < high
        if rows[high] < rows[low]:
            rows[low], rows[high] = rows[high], rows[low]
    assert rows == sorted(values)


def test_their_number_is_that_of_the_network() -> None:
    counts = [len(list(comparators(n))) for n in (0, 1, 2, 3, 4, 8, 16, 64)]
    assert counts == [0, 0, 1, 3, 5, 19, 63, 543]


@pytest.mark.parametrize("islands", [1, 2, 3, 5, 8, 13, 64])
def test_a_trimmed_mean_is_the_weighted_mean_of_the_middle(islands: int) -> None:
    rng = np.random.default_rng(islands)
    deltas = rng.standard_normal((islands, 3, 40)).astype("<f4")
    weights = rng.random(islands).astype("<f4")
    out = max(1, islands // 4) if islands >= 3 else 0
    order = np.argsort(deltas, axis=0)[out : islands - out]
    kept, own = np.take_along_axis(deltas, order, 0), weights[order]
    expected = 0.5 * (kept * own).sum(0) / own.sum(0)
    given = map(jnp.asarray, (deltas, weights, np.float32(0.5)))
    np.testing.assert_allclose(TRIMMED_MEAN.merge(*given), expected, 2e-5, 1e-6)


def test_what_remains_without_weight_counts_equally() -> None:
    deltas = jnp.asarray([[9.0], [1.0], [3.0], [-9.0]])
    weights = jnp.asarray([0.5, 0.0, 0.0, 0.5])
    assert float(TRIMMED_MEAN.merge(deltas, weights, jnp.float32(1.0))[0]) == 2.0


@pytest.mark.optimized
def test_a_trimmed_mean_is_one_loop_without_a_sort() -> None:
    """With a sort by column merges took twenty times as long, and more memory."""
    shapes = jnp.zeros((8, 64, 256)), jnp.zeros(8), jnp.float32(1.0)
    compiled = jax.jit(TRIMMED_MEAN.merge).lower(*shapes).compile()
    text = compiled.as_text()
    assert " sort(" not in text
    assert text.count(" fusion(") == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 256


# ---- every merge rule ---------------------------------------------------------------


@pytest.fixture(params=NAMES, ids=brief)
def rule(request: pytest.FixtureRequest) -> MergeRule:
    """Every member."""
    return MERGE_RULES.find(request.param)


@pytest.mark.parametrize("shape", [(6, 5), (7,), (2, 3, 4)])
def test_a_merged_delta_has_the_shape_of_the_deltas(rule, shape) -> None:
    merged = merge_deltas(drawn(0, 4, shape), [1, 2, 3, 4], rule)
    assert (merged.shape, merged.dtype) == (shape, jnp.float32)
    assert np.isfinite(merged).all()
    nothing = [np.zeros(shape, np.float32)] * 2
    np.testing.assert_array_equal(merge_deltas(nothing, [1, 1], rule), 0)


@given(
    st.integers(0, 1000),
    weights_of,
    st.floats(1e-6, 1e6),
    st.floats(0.01, 1.0),
    st.randoms(use_true_random=False),
)
@few
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_order_and_scale_of_weights_do_not_matter_and_a_share_does(
    name, seed, weights, factor, share, random
) -> None:
    rule, deltas = MERGE_RULES.find(name), drawn(seed, len(weights))
    first = merge_deltas(deltas, weights, rule)
    np.testing.assert_array_equal(merge_deltas(deltas, weights, rule), first)
    pairs = list(zip(deltas, [w * factor for w in weights], strict=True))
    random.shuffle(pairs)
    assert distance(merge_deltas(*zip(*pairs, strict=True), rule), first) < 1e-4
    part = merge_deltas(deltas, weights, rule, share)
    assert distance(part, share * first) < 1e-4


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_a_rule_is_as_it_says_of_itself(rule, scale) -> None:
    delta = scale * drawn(0, 1)[0]
    off = distance(merge_deltas([delta] * 3, [1, 5, 2], rule), delta)
    assert (off < 1e-5) == rule.keeps_equal
    orthogonal = list(np.eye(16, dtype=np.float32).reshape(16, 4, 4)[:8])
    length = float(jnp.linalg.norm(merge_deltas(orthogonal, [1] * 8, rule)))
    assert (length == pytest.approx(1, rel=1e-4)) == rule.keeps_length
    assert merges_bands_alike(rule) == rule.by_element


def test_the_flush_embeddings_and_experts_are_means_unless_the_rule_says_otherwise(
    rule,
) -> None:
    for embedding, expert in ((True, False), (False, True), (False, False)):
        piece = Piece(("w",), -1, SHAPE, embedding, expert=expert)
        own = (embedding or expert) and rule.embeddings_by_mean
        assert rule_for(piece, rule) is (MEAN if own else rule)
        flushed = own or rule.flush_by_mean
        assert rule_for(piece, rule, final=True) is (MEAN if flushed else rule)


def test_encoded_deltas_are_merged_as_decoded_ones_are(rule, monkeypatch) -> None:
    """Whatever the size of blocks."""
    codec, shape = get_codec("int8"), (40, 100)
    encoded = [np.asarray(codec.encode(d)) for d in drawn(1, 3, shape)]
    plain = Encoded.of([codec.decode(e, shape) for e in encoded])
    state = start(rule, shape)
    one = merge_piece(rule, Encoded(codec, shape, encoded), [1, 2, 3], 1.0, state)
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", 1)
    other = merge_piece(rule, plain, [1, 2, 3], 1.0, state)
    np.testing.assert_array_equal(one.delta, other.delta)
    assert one.square == other.square
    exact = np.sum(np.square(np.asarray(one.delta, np.float64)))
    assert one.square == pytest.approx(exact, rel=1e-6)


def test_a_state_keeps_its_structure_and_survives_what_a_crash_does(rule) -> None:
    state = start(rule, SHAPE)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for seed in range(3):
        deltas = Encoded.of(drawn(seed, 2))
        state = merge_piece(rule, deltas, [1, 2], 1.0, state).state
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == like
        state = merging.recovered(rule, state, jnp.asarray(drawn(9, 1)[0]))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == like
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(state)]
    assert merging.state_bytes(rule, SHAPE) == sum(sizes)


# ---- weights ------------------------------------------------------------------------


def test_weightings() -> None:
    expected = {"tokens": 600, "tokens_times_rate": 600 * 200, "uniform": 1}
    for name, value in expected.items():
        assert weight(WEIGHTINGS.find(name), 600, 3) == value


@given(st.integers(1, 10**15), st.integers(1, 10**9))
@pytest.mark.parametrize("name", names(WEIGHTINGS, "weighting"), ids=brief)
def test_a_delta_has_a_finite_weight_that_grows_with_its_tokens(
    name, tokens, steps
) -> None:
    weighting = WEIGHTINGS.find(name)
    found = weight(weighting, tokens, steps)
    assert 0 < found < math.inf
    assert weight(weighting, 2 * tokens, steps) >= found
    assert weight(weighting, 0, 3) == weight(weighting, 5, 0) == 0


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=70), st.floats(0.01, 1.0))
def test_nobody_has_more_than_the_cap_if_there_are_enough(weights, most) -> None:
    found = capped(weights, most)
    shares = [w / math.fsum(found) for w in found]
    assert max(shares) <= max(most, 1 / len(weights)) * (1 + 1e-9)
    order = sorted(range(len(weights)), key=weights.__getitem__)
    assert all(found[a] <= found[b] for a, b in itertools.pairwise(order))
    if max(weights) <= most * math.fsum(weights) * (1 - 1e-9):
        assert found.tolist() == weights


@pytest.mark.parametrize(
    ("weights", "most", "expected"),
    [
        ([1.0, 1.0, 8.0], 0.5, [1.0, 1.0, 2.0]),
        ([1.0, 2.0, 3.0, 94.0], 0.4, [1.0, 2.0, 3.0, 4.0]),
        ([1.0, 1.0, 40.0, 58.0], 0.3, [1.0, 1.0, 1.5, 1.5]),
        ([3.0, 5.0], 1.0, [3.0, 5.0]),
        # With too few for the cap all weigh the same, and an empty delta nothing.
        ([1.0, 9.0], 0.4, [1.0, 1.0]),
        ([7.0], 0.2, [1.0]),
        ([0.0, 9.0], 0.4, [0.0, 1.0]),
    ],
)
def test_those_below_the_cap_keep_their_proportions(weights, most, expected) -> None:
    assert capped(weights, most) == pytest.approx(expected)
    both = capped(np.array([weights, weights[::-1]]).T, most)
    np.testing.assert_allclose(both.T, [expected, expected[::-1]])
