"""Every parameter is in exactly one fragment, and fragments are even."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.core.fragments import (
    FragmentPlan,
    digest_arrays,
    from_pieces,
    get_piece,
    plan_fragments,
    set_piece,
    to_pieces,
)

SHAPES = {
    "embed": (256, 8),
    "blocks": {"wq": (3, 8, 16), "norm": (3, 8)},
    "final_norm": (8,),
}
AXES = {
    "embed": ("vocab", "embed"),
    "blocks": {"wq": ("layers", "embed", "heads"), "norm": ("layers", "embed")},
    "final_norm": ("embed",),
}


def params() -> dict[str, object]:
    rng = np.random.default_rng(0)
    return {
        "embed": rng.standard_normal((256, 8), np.float32),
        "blocks": {
            "wq": rng.standard_normal((3, 8, 16), np.float32),
            "norm": rng.standard_normal((3, 8), np.float32),
        },
        "final_norm": rng.standard_normal((8,), np.float32),
    }


def test_pieces_are_tensors_and_layers_of_stacked_ones() -> None:
    plan = plan_fragments(SHAPES, AXES, 2)
    assert {p.name: (p.shape, p.layer, p.embedding) for p in plan.pieces} == {
        "embed": ((256, 8), -1, True),
        **{f"blocks/wq/{i}": ((8, 16), i, False) for i in range(3)},
        **{f"blocks/norm/{i}": ((8,), i, False) for i in range(3)},
        "final_norm": ((8,), -1, False),
    }
    assert plan.sizes == (2048, 3 * 128 + 4 * 8)
    assert plan.total == 256 * 8 + 3 * 8 * 16 + 3 * 8 + 8


def test_pieces_stand_in_the_order_of_path_and_layer() -> None:
    shapes, axes = {"w": (12, 4)}, {"w": ("layers", None)}
    (fragment,) = plan_fragments(shapes, axes, 1).fragments
    assert [piece.layer for piece in fragment] == list(range(12))


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    share=st.floats(0.01, 1),
)
def test_fragments_are_balanced(sizes: list[int], share: float) -> None:
    count = max(1, int(len(sizes) * share))
    shapes = {f"p{i}": (size,) for i, size in enumerate(sizes)}
    plan = plan_fragments(shapes, dict.fromkeys(shapes, (None,)), count)
    assert sorted(p.name for p in plan.pieces) == sorted(shapes)
    assert all(plan.fragments)
    assert max(plan.sizes) - min(plan.sizes) <= max(sizes)


def test_plan_does_not_depend_on_the_order_of_keys() -> None:
    backwards = dict(reversed(SHAPES.items()))
    assert plan_fragments(backwards, AXES, 3) == plan_fragments(SHAPES, AXES, 3)


def test_digest_tells_plans_apart() -> None:
    plan = plan_fragments(SHAPES, AXES, 3)
    swapped = FragmentPlan(plan.fragments[::-1])
    other_shape = plan_fragments({**SHAPES, "final_norm": (9,)}, AXES, 3)
    digests = {p.digest() for p in (plan, swapped, other_shape)}
    assert len(digests) == 3
    assert plan.digest() == plan_fragments(SHAPES, AXES, 3).digest()


@pytest.mark.parametrize("count", [0, 9])
def test_impossible_number_of_fragments_names_both_values(count: int) -> None:
    with pytest.raises(ValueError, match=rf"num_fragments = {count}.* 8 pieces"):
        plan_fragments(SHAPES, AXES, count)


def test_shapes_and_axes_must_match() -> None:
    with pytest.raises(ValueError, match="blocks: shapes have the keys"):
        plan_fragments(SHAPES, {**AXES, "blocks": {"wq": ()}}, 2)
    with pytest.raises(ValueError, match="final_norm: shape"):
        plan_fragments(SHAPES, {**AXES, "final_norm": ("a", "b")}, 2)


def test_ambiguous_names_are_refused() -> None:
    shapes = {"w": (2, 4), "w/0": (4,)}
    axes = {"w": ("layers", None), "w/0": (None,)}
    with pytest.raises(ValueError, match="3 pieces have only 2 names"):
        plan_fragments(shapes, axes, 2)


def test_pieces_make_up_the_parameters_again() -> None:
    plan, tree = plan_fragments(SHAPES, AXES, 3), params()
    again = from_pieces(plan, to_pieces(plan, tree))
    for piece in plan.pieces:
        np.testing.assert_array_equal(get_piece(again, piece), get_piece(tree, piece))
    assert again["blocks"]["wq"].shape == (3, 8, 16)


def test_from_pieces_names_what_is_wrong() -> None:
    plan = plan_fragments(SHAPES, AXES, 3)
    arrays = to_pieces(plan, params())
    with pytest.raises(ValueError, match="shape \\(2,\\)"):
        from_pieces(plan, {**arrays, "final_norm": np.zeros(2)})
    del arrays["embed"]
    with pytest.raises(ValueError, match="missing \\['embed'\\]"):
        from_pieces(plan, arrays)


def test_set_piece_changes_one_layer_and_not_the_original() -> None:
    plan, tree = plan_fragments(SHAPES, AXES, 3), params()
    piece = next(p for p in plan.pieces if p.name == "blocks/wq/1")
    changed = set_piece(tree, piece, jnp.zeros((8, 16)))
    assert not np.any(get_piece(changed, piece))
    for other in plan.pieces:
        if other != piece:
            ours, theirs = get_piece(changed, other), get_piece(tree, other)
            np.testing.assert_array_equal(ours, theirs)
    assert np.any(get_piece(tree, piece))


def test_array_digest_sees_values_and_not_layout() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert digest_arrays([x]) == digest_arrays([jnp.asarray(x)])
    assert digest_arrays([x.T]) == digest_arrays([np.ascontiguousarray(x.T)])
    assert digest_arrays([x]) != digest_arrays([x + 1])
    assert len(digest_arrays([np.float32(1)])) == 64
