"""Checks a merge rule from outside the package on tiny pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.core.merge.merging import Plain, merge_piece, start
from diloco_jax.core.merge.rule import MergeRule

SHAPES = ((64, 64), (5,))
"""Shapes of the pieces: of four tiles, and of one."""
ISLANDS = 3
KINDS = ("sum", "fold", "elementwise", "whole")


def check(rule: MergeRule) -> None:
    """Raise an error that says what is wrong with the rule, if anything is."""
    needs = getattr(rule, "needs", None)
    if needs not in KINDS:
        raise ValueError(
            f"needs = {needs!r}; a merge rule is an object whose `needs` is one of "
            f"{', '.join(KINDS)}: make one of a class in diloco_jax.core.merge.rule"
        )
    for shape in SHAPES:
        state, rng = start(rule, shape), np.random.default_rng(0)
        like = jax.tree.map(jnp.shape, state)
        for islands in (ISLANDS, 1):
            for scale in (1.0, 0.0):
                drawn = rng.standard_normal((islands, *shape)) * scale
                deltas = Plain(list(drawn.astype(np.float32)))
                weights = [1.0 + i for i in range(islands)]
                merged = merge_piece(rule, deltas, weights, 0.5, state)
                if not np.isfinite(merged.delta).all():
                    raise ValueError(
                        "it made numbers that are not finite of finite deltas, which "
                        "may be zero"
                    )
                if jax.tree.map(jnp.shape, merged.state) != like:
                    raise ValueError(
                        f"a merge makes a state of shapes "
                        f"{jax.tree.map(jnp.shape, merged.state)} of one of {like}; it "
                        f"must keep its structure"
                    )
                state = merged.state
