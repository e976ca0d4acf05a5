"""Trees beside the parameters are moved by what an adoption changes in these."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_exchange import PLAN, V1, full_payload, place, random_params, start

from diloco_jax.config import SyncConfig
from diloco_jax.island.device.exchange import LentBeside
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.mailbox import Arrival


def lent_at(params, *beside):
    """Parameters that are not their anchors, and trees beside them."""
    leaves = LikeLeaves(place(params))
    exchange = start(SyncConfig(fragments=3), random_params(0))
    lent = LentBeside(exchange, leaves.as_listed(place(params)))
    lent.beside = [leaves.as_beside(place_as(tree)) for tree in beside]
    return leaves, lent


def place_as(tree):
    return jax.tree.map(
        lambda x, like: jax.device_put(jnp.array(x), like.sharding), tree, place(tree)
    )


def adopt(lent, fragment, values):
    anchor = lent._exchange.put_anchor(fragment, full_payload(values, fragment))
    lent.adopt(Arrival(fragment=fragment, version=V1, anchor=anchor), keep=False)


def largest(tree):
    return max(
        float(abs(np.asarray(x, np.float32)).max()) for x in jax.tree.leaves(tree)
    )


def minus(a, b):
    return jax.tree.map(lambda x, y: np.float32(x) - np.float32(y), a, b)


@pytest.mark.parametrize("fragments", [[0], [0, 1, 2]])
def test_what_is_beside_stays_as_far_from_the_parameters(fragments):
    local, average = random_params(1), random_params(2)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), local)
    leaves, lent = lent_at(local, average, low)
    lent.warm()
    before = minus(average, local)
    for fragment in fragments:
        adopt(lent, fragment, random_params(3))
    params = leaves.as_tree(lent.params)
    average, low = map(leaves.as_tree, lent.beside)
    assert largest(minus(params, local)) > 0.1
    assert largest(minus(minus(average, params), before)) < 2e-6
    assert {x.dtype for x in jax.tree.leaves(low)} == {jnp.dtype(jnp.bfloat16)}
    assert largest(minus(low, params)) < 0.05


def test_a_fragment_that_is_not_adopted_stays_to_the_bit():
    local, average = random_params(1), random_params(2)
    leaves, lent = lent_at(local, average)
    adopt(lent, 0, random_params(3))
    (moved,) = map(leaves.as_tree, lent.beside)
    pieces = {piece.name: piece for piece in PLAN.pieces}
    for piece in pieces.values():
        here, there = (_piece(tree, piece) for tree in (moved, average))
        assert np.array_equal(here, there) == (piece not in PLAN.fragments[0])


def _piece(tree, piece):
    for key in piece.path:
        tree = tree[key]
    return np.asarray(tree if piece.layer < 0 else tree[piece.layer])


def test_a_reset_replaces_what_is_not_finite():
    local = random_params(1)
    local["norm"][:] = np.nan
    leaves, lent = lent_at(local, local)
    for fragment in range(3):
        lent.judge(fragment, "reset")
    assert largest(minus(leaves.as_tree(lent.params), random_params(0))) == 0
    assert largest(minus(leaves.as_tree(lent.beside[0]), random_params(0))) < 1e-6


def test_warming_changes_nothing():
    local, average = random_params(1), random_params(2)
    leaves, lent = lent_at(local, average)
    lent.warm()
    assert largest(minus(leaves.as_tree(lent.beside[0]), average)) == 0
    assert largest(minus(leaves.as_tree(lent.params), local)) == 0


def test_what_cannot_be_beside_is_named():
    leaves = LikeLeaves({"w": jnp.ones(4)})
    leaves.as_beside({"w": jnp.ones(4, jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"w is int32\[4\] .* floating dtype"):
        leaves.as_beside({"w": jnp.ones(4, jnp.int32)})
    with pytest.raises(ValueError, match=r"w is float32\[3\]"):
        leaves.as_beside({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="alongside was given"):
        leaves.as_beside([jnp.ones(4)])
