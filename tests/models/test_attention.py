"""The kernel for TPUs, interpreted here, and the plain formula are one attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import ConfigError
from diloco_jax.config.config import LANES
from diloco_jax.models.layers import ATTENTION
from diloco_jax.models.model import Layout

LAYOUT = Layout.of_one_device()


def arrays(length: int, heads: int = 4, key_heads: int = 2, head_dim: int = 16):
    random = np.random.default_rng(0)
    return [
        random.normal(size=(2, length, n, head_dim)).astype(np.float32)
        for n in (heads, key_heads, key_heads)
    ]


def test_kernel_and_formula_agree_with_their_gradients():
    # Three blocks, so that some are masked whole, some in part.
    found = []
    for name in ("splash", "dot_product"):
        attend = functools.partial(ATTENTION[name], LAYOUT)

        def loss(*parts, attend=attend):
            mixed = attend(*parts)
            return jnp.sum(mixed * jnp.cos(jnp.arange(mixed.size).reshape(mixed.shape)))

        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        found.append(jax.tree.leaves(grad(*arrays(3 * LANES))))
    for kernel, formula in zip(*found, strict=True):
        np.testing.assert_allclose(kernel, formula, rtol=1e-3, atol=1e-4)


def test_auto_is_the_formula_where_there_is_no_tpu():
    parts = arrays(LANES)
    made = [
        str(jax.make_jaxpr(functools.partial(ATTENTION[name], LAYOUT))(*parts))
        for name in ("auto", "dot_product")
    ]
    assert made[0] == made[1]


def test_lengths_that_the_kernel_cannot_cut_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"sequence_length = 100: .* multiple of 128"):
        ATTENTION["splash"](LAYOUT, *arrays(100))
