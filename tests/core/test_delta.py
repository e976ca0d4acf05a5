"""The delta points from the island's values to the anchor."""

import jax.numpy as jnp
import numpy as np

from diloco_jax.core.changes import delta


def test_delta_is_anchor_minus_local_in_f32() -> None:
    anchor, local = np.float32([1.0, 2.0]), jnp.asarray([0.5, 3.0], jnp.bfloat16)
    result = delta(anchor, local)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, [0.5, -1.0])
