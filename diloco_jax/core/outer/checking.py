"""Check an outer optimizer from outside the package on a tiny fragment."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.core.outer.rule import Arrays, OuterOptimizer
from diloco_jax.core.rounding import equal_but_for_rounding
from diloco_jax.core.tiles import TileGrid

SHAPES = ((64, 64), (5,))
"""Shapes of the pieces: of four tiles, and of one."""
MOMENTUM = 0.5
STEPS = 2


def check(optimizer: OuterOptimizer) -> None:
    """Raise an error that describes the fault of the optimizer, if it has one."""
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
    claims = getattr(optimizer, "elementwise", False)
    if claims and not steps_tiles_alike(optimizer):
        raise ValueError(
            "it has elementwise = True, but its update of an element depends on other "
            "elements too, or on the shape: tiles of a fragment, one by one, are "
            "updated otherwise than the whole; leave elementwise out, and it is given "
            "whole fragments"
        )


def steps_tiles_alike(optimizer: OuterOptimizer) -> bool:
    """Tell whether stepping a fragment tile by tile gives the same result as stepping
    it whole.

    It compares the new parameters and, if the optimizer has `delta_of`, the deltas that
    it finds.
    """
    rng = np.random.default_rng(0)
    # Tiles differ in length, so that what is scaled by a length differs.
    lengths = np.logspace(0, 1, SHAPES[0][0])[:, None], np.ones(())
    theta, *deltas = (
        tuple(
            jnp.asarray(rng.standard_normal(shape) * length, jnp.float32)
            for shape, length in zip(SHAPES, lengths, strict=True)
        )
        for _ in range(1 + STEPS)
    )
    whole = _in_tiles(_results(optimizer, theta, deltas))
    parts = [
        _results(optimizer, (values,), [(own,) for own in given])
        for values, *given in zip(*_in_tiles([theta, *deltas]), strict=True)
    ]
    return all(
        equal_but_for_rounding(tile, wanted)
        for results, *each in zip(whole, *parts, strict=True)
        for (tile,), wanted in zip(each, results, strict=True)
    )


def _results(
    optimizer: OuterOptimizer, theta: Arrays, deltas: Sequence[Arrays]
) -> list[Arrays]:
    """Return the updates of each step, and the deltas that are found for them."""
    tx = optimizer(MOMENTUM)
    state, results = tx.init(theta), []
    for delta in deltas:
        updates, after = tx.update(delta, state, theta)
        results.append(updates)
        if delta_of := getattr(optimizer, "delta_of", None):
            results.append(delta_of(updates, state, MOMENTUM))
        state = after
    return results


def _in_tiles(fragments: Sequence[Arrays]) -> list[list[jax.Array]]:
    """Return the tiles of all pieces of each fragment: f32[1, elements] each."""
    return [
        [
            tile[None]
            for piece in fragment
            for tile in TileGrid.of(piece.shape).to_tiles(piece)
        ]
        for fragment in fragments
    ]
