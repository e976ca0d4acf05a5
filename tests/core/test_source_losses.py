"""Losses of a mixture are added up by source."""

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.core.inner import by_source


def test_each_row_counts_for_its_own_source():
    sums = by_source(
        jnp.array([2, 0, 2, 0]),
        jnp.array([1.0, 2.0, 4.0, 8.0]),
        jnp.array([1.0, 3.0, 5.0, 7.0]),
        4,
    )
    np.testing.assert_array_equal(sums, [[10, 10], [0, 0], [5, 6], [0, 0]])


def test_sums_are_those_of_numpy():
    rng = np.random.default_rng(0)
    sources = rng.integers(0, 7, 64).astype(np.int32)
    rows = rng.random((2, 64)).astype(np.float32)
    sums = jax.jit(by_source, static_argnums=3)(sources, *rows, 7)
    by_hand = [[row[sources == n].sum() for row in rows] for n in range(7)]
    np.testing.assert_allclose(sums, by_hand, rtol=1e-6)
