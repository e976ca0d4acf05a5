"""Merge rules against float64 references. What holds for all of them is in
`test_merge_contract.py`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import merge_deltas

from diloco_jax.core.families import MERGE_RULES, WEIGHTINGS, MergeRule
from diloco_jax.core.fragments import Piece
from diloco_jax.core.merge_rules import MEAN, RDA, TRIMMED_MEAN, comparators, weight
from diloco_jax.core.merging import Encoded, rule_for

SHAPE = (6, 5)
weights_of = st.lists(st.floats(0.01, 1e9), min_size=1, max_size=5)
rules = st.sampled_from([RDA, MEAN])
few = settings(max_examples=30)


def deltas_of(seed: int, count: int) -> list[np.ndarray]:
    """Deltas of very different lengths."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-6, 3, count)
    return [(rng.standard_normal(SHAPE) * s).astype(np.float32) for s in scales]


def reference(
    deltas: Sequence[np.ndarray], weights: Sequence[float], rule: MergeRule
) -> np.ndarray:
    """The module's formulas in float64."""
    stacked = np.stack(deltas).astype(np.float64)
    w = np.array(weights) / np.sum(weights)
    if rule is MEAN:
        return np.einsum("m,mij->ij", w, stacked)
    norms = np.linalg.norm(stacked.reshape(len(w), -1), axis=1)
    direction = np.einsum("m,mij->ij", w / norms, stacked)
    return w @ norms * direction / np.linalg.norm(direction)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@given(st.integers(0, 1000), weights_of, rules)
@few
def test_merge_is_the_formula(seed: int, weights: list[float], rule: MergeRule) -> None:
    deltas = deltas_of(seed, len(weights))
    merged = merge_deltas(deltas, weights, rule)
    assert distance(merged, reference(deltas, weights, rule)) < 1e-5


@given(st.integers(0, 1000), weights_of)
@few
def test_rda_keeps_the_weighted_mean_length(seed: int, weights: list[float]) -> None:
    deltas = deltas_of(seed, len(weights))
    norms = [float(np.linalg.norm(d.astype(np.float64))) for d in deltas]
    expected = np.dot(weights, norms) / np.sum(weights)
    merged = np.asarray(merge_deltas(deltas, weights, RDA), np.float64)
    assert abs(np.linalg.norm(merged) / expected - 1) < 1e-5


def test_so_it_does_where_directions_cancel() -> None:
    (delta,) = deltas_of(0, 1)
    merged = merge_deltas([delta, -3 * delta], [1, 1], RDA, 0.5)
    assert distance(merged, -0.5 * delta) < 1e-6


def test_a_zero_delta_shortens_and_does_not_turn() -> None:
    (delta,) = deltas_of(1, 1)
    merged = merge_deltas([np.zeros_like(delta), delta], [3, 1], RDA)
    assert distance(merged, delta / 4) < 1e-6


def test_cancelled_directions_fall_back_to_the_mean() -> None:
    (delta,) = deltas_of(2, 1)
    merged = merge_deltas([delta, -3 * delta], [1, 1], RDA)
    assert distance(merged, -delta) < 1e-6
    np.testing.assert_array_equal(merge_deltas([0 * delta] * 2, [1, 1], RDA), 0)


def test_rounding_is_not_taken_for_a_direction() -> None:
    (delta,) = deltas_of(3, 1)
    almost = (-delta * np.float32(1 + 1e-6)).astype(np.float32)
    merged = merge_deltas([delta, almost], [1, 1], RDA)
    assert np.linalg.norm(merged) < 1e-5 * np.linalg.norm(delta)


def test_norms_of_large_pieces_are_accurate() -> None:
    x = np.random.default_rng(0).random(4_000_000, np.float32) + 1
    exact = np.sqrt(np.sum(np.square(x, dtype=np.float64)))
    (square,) = Encoded.of([x]).squares
    assert abs(np.sqrt(square) / exact - 1) < 1e-12


@pytest.mark.parametrize(
    ("deltas", "weights", "message"),
    [
        (1, [1.0, 2.0], "1 deltas and 2 weights"),
        (0, [], "0 deltas and 0 weights"),
        (2, [1.0, -1.0], "must be finite, not negative"),
        (2, [0.0, 0.0], "not all zero"),
        (2, [1.0, float("nan")], "must be finite"),
        (1, [float("inf")], "must be finite"),
    ],
)
def test_unfit_weights_are_refused(
    deltas: int, weights: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        merge_deltas(deltas_of(0, deltas), weights, RDA)
    with pytest.raises(ValueError, match="no merge rule 'median'"):
        MERGE_RULES.find("median")
    for share in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share"):
            merge_deltas(deltas_of(0, 1), [1.0], MEAN, share)


def test_weightings() -> None:
    expected = {"tokens": 600, "tokens_times_rate": 600 * 200, "uniform": 1}
    for name, value in expected.items():
        assert weight(WEIGHTINGS.find(name), 600, 3) == value
        assert weight(WEIGHTINGS.find(name), 0, 0) == 0
    with pytest.raises(ValueError, match="no weighting 'loss'"):
        WEIGHTINGS.find("loss")


@pytest.mark.parametrize("wrong", [1e6, -1.0])
def test_a_trimmed_mean_of_eight_lies_between_the_honest_six(wrong: float) -> None:
    honest = [np.full(SHAPE, 1 + i / 10, np.float32) for i in range(6)]
    lies = [np.full(SHAPE, wrong, np.float32)] * 2
    merged = merge_deltas([*lies, *honest], [1.0] * 8, MERGE_RULES.find("trimmed_mean"))
    assert 1.0 <= merged.min() <= merged.max() <= 1.5


def test_a_clipped_mean_shortens_what_is_longer_than_most() -> None:
    rule, x, y = MERGE_RULES.find("clipped_mean"), np.zeros(2), np.zeros(2)
    x[0], y[1] = 1, 1
    deltas = [v.astype(np.float32) for v in (x, 3 * x, 1e6 * y)]
    np.testing.assert_allclose(
        merge_deltas(deltas, [1.0, 1.0, 2.0], rule), [1.0, 1.5], rtol=1e-6
    )
    np.testing.assert_allclose(
        merge_deltas(deltas, [1.0, 1.0, 1.0], rule), [4 / 3, 1.0], rtol=1e-6
    )
    zeros = [0 * d for d in deltas]
    assert not merge_deltas(zeros, [1.0, 1.0, 1.0], rule).any()


def test_rules_against_liars_are_for_all_pieces_and_the_last_merge() -> None:
    embedding = Piece(("e",), -1, SHAPE, True)
    for name in ("trimmed_mean", "clipped_mean"):
        assert rule_for(
            embedding, MERGE_RULES.find(name), final=True
        ) is MERGE_RULES.find(name)


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
def test_it_is_the_weighted_mean_of_the_middle(islands: int) -> None:
    rng = np.random.default_rng(islands)
    deltas = rng.standard_normal((islands, 3, 40)).astype("<f4")
    weights = rng.random(islands).astype("<f4")
    out = max(1, islands // 4) if islands >= 3 else 0
    order = np.argsort(deltas, axis=0)[out : islands - out]
    kept, own = np.take_along_axis(deltas, order, 0), weights[order]
    expected = 0.5 * (kept * own).sum(0) / own.sum(0)
    found = TRIMMED_MEAN.merge(
        jnp.asarray(deltas), jnp.asarray(weights), jnp.float32(0.5)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_what_remains_without_weight_counts_equally() -> None:
    deltas = jnp.asarray([[9.0], [1.0], [3.0], [-9.0]])
    weights = jnp.asarray([0.5, 0.0, 0.0, 0.5])
    found = TRIMMED_MEAN.merge(deltas, weights, jnp.float32(1.0))
    assert float(found[0]) == 2.0


@pytest.mark.optimized
def test_a_merge_is_one_loop_without_a_sort() -> None:
    """With a sort by column merges took twenty times as long, and more memory."""
    shapes = jnp.zeros((8, 64, 256)), jnp.zeros(8), jnp.float32(1.0)
    compiled = jax.jit(TRIMMED_MEAN.merge).lower(*shapes).compile()
    text = compiled.as_text()
    assert " sort(" not in text
    assert text.count(" fusion(") == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 256
