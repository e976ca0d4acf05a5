"""The parameters of a loop that joins: between its tree and the names of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from diloco_jax.config import ConfigError
from diloco_jax.core.fragments import from_pieces, get_piece, plan_fragments
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.models.model import named

# As a list and by numbers, "10" comes before "2" among the names.
TREE = {
    "blocks": [jnp.full((2, 3), n, jnp.float32) for n in range(12)],
    "a": jnp.ones(1),
}


def same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_leaves_have_their_names_whatever_the_order():
    leaves = LikeLeaves(TREE)
    listed = leaves.as_listed(TREE)
    assert [int(leaf.ravel()[0]) for leaf in listed] == [1, 0, 1, 10, 11, *range(2, 10)]
    same(leaves.as_tree(listed), TREE)
    same(leaves.as_tree(named(TREE)), TREE)
    same(leaves.like, jax.tree.map(lambda x: x, leaves.like))
    assert leaves.like["blocks"]["10"].shape == (2, 3)
    assert leaves.smallest(listed).shape == (1,)


def test_pieces_of_a_plan_make_the_tree_again():
    params = named(TREE)
    shapes = jax.tree.map(lambda x: x.shape, params)
    axes = jax.tree.map(lambda x: (None,) * x.ndim, params)
    plan = plan_fragments(shapes, axes, 3)
    pieces = {piece.name: get_piece(params, piece) for piece in plan.pieces}
    same(LikeLeaves(TREE).as_tree(from_pieces(plan, pieces)), TREE)


def test_what_differs_at_a_boundary_is_named_whenever_it_does():
    leaves = LikeLeaves(TREE)
    for _ in range(2):
        leaves.as_listed(TREE)
        with pytest.raises(ValueError, match=r"a is float32\[2\] at the boundary"):
            leaves.as_listed(TREE | {"a": jnp.ones(2)})
        with pytest.raises(ValueError, match=r"a is int32\[1\] at the boundary"):
            leaves.as_listed(TREE | {"a": np.ones(1, np.int32)})
        with pytest.raises(ValueError, match="give it the parameters alone"):
            leaves.as_listed((TREE, 1))


def test_parameters_lie_as_like_does():
    leaves = LikeLeaves({"w": jnp.ones(4)})
    leaves.as_listed({"w": np.ones(4, np.float32)})
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    here = NamedSharding(mesh, PartitionSpec("x"))
    leaves.as_listed({"w": jax.device_put(jnp.ones(4), here)})
    elsewhere = here.with_memory_kind("unpinned_host")
    assert elsewhere.memory_kind != here.memory_kind
    with pytest.raises(ValueError, match=r"w lies as .*unpinned_host"):
        leaves.as_listed({"w": jax.device_put(jnp.ones(4), elsewhere)})


def test_results_of_one_program_are_looked_at_once(monkeypatch):
    leaves, looks = LikeLeaves(TREE), []
    monkeypatch.setattr(leaves, "_check", looks.append)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
    tree = TREE
    for _ in range(3):
        leaves.as_listed(tree := step(tree))
    assert len(looks) == 1


def test_values_of_like_are_there_if_they_are_asked_for():
    leaves = LikeLeaves(TREE)
    same(leaves.as_tree(leaves.first(TREE)), TREE)
    shapes = jax.eval_shape(lambda: TREE)
    with pytest.raises(ConfigError, match="give arrays with values"):
        LikeLeaves(TREE).first(shapes)


def test_a_mesh_of_explicit_axes_is_refused():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    lies = NamedSharding(mesh, PartitionSpec("x"))
    with pytest.raises(ConfigError, match=r"AxisType\.Auto"):
        LikeLeaves({"w": jax.device_put(jnp.ones(4), lies)})


def test_all_processes_of_the_world_have_a_part(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"devices of 1 processes.* world has 2"):
        LikeLeaves({"w": jnp.ones(4)})
