"""Both ways to leave a change out give the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.island.device.unless import unless


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("stays", [True, False])
def test_the_tree_stays_or_changes_whole(stays, platform):
    tree = {"a": jnp.arange(4.0), "b": [jnp.int32(3)]}

    def changed(tree):
        return jax.tree.map(lambda x: x * jnp.asarray(2, x.dtype), tree)

    found = jax.jit(
        lambda stays, tree: unless(stays, changed, tree, platform), donate_argnums=1
    )(jnp.asarray(stays), jax.tree.map(jnp.copy, tree))
    wanted = tree if stays else changed(tree)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_what_is_not_finite_does_not_leak(platform):
    found = unless(jnp.asarray(True), lambda x: x * jnp.nan, jnp.ones(3), platform)
    np.testing.assert_array_equal(found, 1)
