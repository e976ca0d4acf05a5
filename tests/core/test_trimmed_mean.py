"""The trimmed mean: what it leaves out, and what it costs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.core.merge_rules import TRIMMED_MEAN, comparators


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
