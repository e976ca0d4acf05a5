"""The part of an island that a train loop keeps in its own checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from diloco_jax.config import ConfigError, RunConfig, SyncConfig
from diloco_jax.island.checkpoints import require_own, restored_state, saved_state
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.models.build import build_plan
from diloco_jax.models.model import Model
from diloco_jax.protocol.values import FIRST_VERSION, Version
from diloco_jax.wire.bulk import Identity

FRAGMENTS = 4
TREE = {
    "stacked": [jnp.arange(4 * 24.0).reshape(4, 24) / 7],
    "plain": tuple(jnp.full((3, 5), n / 3) for n in range(4)),
}


def identity(**changes):
    fields = {"run_id": "f00", "island": "a", "incarnation": 1, "session": "s"}
    return Identity(**(fields | changes))


def made(error_feedback=True):
    """An island of anchors of zeros that has taken every fragment at `TREE`."""
    leaves = LikeLeaves(TREE)
    run = RunConfig(sync=SyncConfig(fragments=FRAGMENTS, error_feedback=error_feedback))
    axes = jax.tree.map(lambda x: (None,) * len(x.shape), leaves.like)
    axes["stacked"]["0"] = ("layers", None)
    plan = build_plan(run, Model(lambda key: leaves.like, None, axes))
    exchange = Exchange(plan, run.sync, leaves.zeros())
    nothing = {
        f: exchange.put_anchor(f, np.zeros(exchange.anchor_bytes(f), np.uint8))
        for f in range(FRAGMENTS)
    }
    exchange.start(nothing)
    params = leaves.as_listed(TREE)
    for fragment in range(FRAGMENTS):
        exchange.take(fragment, params)
    return exchange, leaves


def residuals_of(exchange, fragment):
    return [np.asarray(held.settled) for held in exchange.held(fragment)]


def kept(exchange, leaves, folder, outstanding=(), **changes):
    """The state, through a checkpoint."""
    state = saved_state(
        exchange,
        leaves,
        identity(**changes),
        steps=12,
        versions=[FIRST_VERSION] * FRAGMENTS,
        outstanding=outstanding,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state")


def test_residuals_come_back_where_nothing_came_after_them(tmp_path):
    exchange, leaves = made()
    for fragment in (0, 1, 2):
        exchange.settle(fragment)
    state = kept(exchange, leaves, tmp_path, outstanding=[3])
    now = [FIRST_VERSION, Version(1, 5), FIRST_VERSION, FIRST_VERSION]
    restored = restored_state(state, exchange, leaves, now)
    assert (restored.incarnation, restored.steps) == (1, 12)
    assert sorted(restored.residuals) == [0, 2]
    for fragment in (0, 2):
        expected = residuals_of(exchange, fragment)
        assert any(array.any() for array in expected)
        for array, value in zip(expected, restored.residuals[fragment], strict=True):
            np.testing.assert_array_equal(value, array)


def test_an_outstanding_take_is_as_if_it_were_not_there(tmp_path):
    exchange, leaves = made()
    state = kept(exchange, leaves, tmp_path)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state["residuals"]))


def test_without_error_feedback_there_are_a_few_numbers_alone(tmp_path):
    exchange, leaves = made(error_feedback=False)
    state = kept(exchange, leaves, tmp_path)
    assert sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(state)) < 200
    assert not restored_state(
        state, exchange, leaves, [FIRST_VERSION] * FRAGMENTS
    ).residuals


def test_a_state_that_is_none_of_this_island_is_named(tmp_path):
    exchange, leaves = made()
    state = kept(exchange, leaves, tmp_path)
    require_own(state, identity(incarnation=2), exchange, FRAGMENTS)
    for changes, fragments, shown in (
        ({"run_id": "bad"}, FRAGMENTS, "state is of run 'f00', this is run 'bad'"),
        ({"island": "b"}, FRAGMENTS, "of island 'a', this is island 'b'"),
        ({"incarnation": 1}, FRAGMENTS, "of incarnation 1, this one is 1"),
        ({}, 7, "versions of 4 fragments, the run has 7"),
    ):
        here = identity(**({"incarnation": 2} | changes))
        with pytest.raises(ConfigError, match=shown):
            require_own(state, here, exchange, fragments)
    some = {k: v for k, v in state.items() if k not in ("residuals", "steps")}
    with pytest.raises(ConfigError, match="lacks residuals, steps"):
        require_own(some, identity(incarnation=2), exchange, FRAGMENTS)
    other = state | {"residuals": {"w": np.zeros(3, np.float32)}}
    with pytest.raises(ValueError, match="parameters of other names"):
        restored_state(other, exchange, leaves, [FIRST_VERSION] * FRAGMENTS)
