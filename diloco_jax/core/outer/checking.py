"""Check an outer optimizer from outside the package on a tiny fragment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.core.outer.rule import OuterOptimizer

SHAPES = ((4, 6), (5,))
MOMENTUM = 0.5
STEPS = 2


def check(optimizer: OuterOptimizer) -> None:
    """Raise an error that says what is wrong with the optimizer, if anything is."""
    tx = optimizer(MOMENTUM)
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"it returned {type(tx).__name__}; it must return an "
            f"optax.GradientTransformation"
        )
    rng = np.random.default_rng(0)
    theta = tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in SHAPES)
    state = tx.init(theta)
    for _ in range(STEPS):
        updates, after = jax.jit(tx.update)(theta, state, theta)
        for update, shape in zip(updates, SHAPES, strict=True):
            if (update.shape, update.dtype) != (shape, jnp.float32):
                raise ValueError(
                    f"its update of float32{list(shape)} is "
                    f"{update.dtype}{list(update.shape)}; it must be of that shape and "
                    f"dtype"
                )
            if not np.isfinite(update).all():
                raise ValueError("its update of a finite delta is not finite")
        if jax.tree.map(jnp.shape, after) != jax.tree.map(jnp.shape, state):
            raise ValueError("its state changes its structure from step to step")
        state = after
