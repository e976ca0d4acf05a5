"""Every parameter is in exactly one fragment, and fragments are even. Bands
partition a tensor, whatever its shape, and merge as the whole would."""

import hashlib
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pieces import merge_deltas, to_pieces

from diloco_jax import files
from diloco_jax.config import FragmentBy
from diloco_jax.core.families import MERGE_RULES, Whole
from diloco_jax.core.fragments import (
    Bands,
    FragmentPlan,
    Piece,
    from_pieces,
    get_piece,
    plan_fragments,
)
from diloco_jax.core.merging import MEAN, may_cut
from diloco_jax.core.tiles import digest_arrays, sha256_arrays

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


@given(
    layers=st.integers(1, 6),
    stacked=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    outside=st.lists(st.integers(1, 200), max_size=3),
    share=st.floats(0.01, 1),
    by=st.sampled_from(["size", "layer", "tensor"]),
)
def test_fragments_are_balanced_and_keep_together_what_they_are_told(
    layers: int, stacked: list[int], outside: list[int], share: float, by: FragmentBy
) -> None:
    shapes = {f"s{i}": (layers, size) for i, size in enumerate(stacked)}
    axes = dict.fromkeys(shapes, ("layers", None))
    shapes |= {f"o{i}": (size,) for i, size in enumerate(outside)}
    axes |= dict.fromkeys([f"o{i}" for i in range(len(outside))], (None,))
    together = {
        "size": stacked * layers,
        "layer": [sum(stacked)] * layers,
        "tensor": [layers * size for size in stacked],
    }[by]
    dealt = [*together, *outside]
    plan = plan_fragments(shapes, axes, max(1, int(len(dealt) * share)), by)
    assert set(plan.pieces) == set(plan_fragments(shapes, axes, 1).pieces)
    assert len(plan.pieces) == layers * len(stacked) + len(outside)
    assert all(plan.fragments)
    assert max(plan.sizes) - min(plan.sizes) <= max(dealt)
    units = {
        "size": lambda p: p,
        "layer": lambda p: p.layer,
        "tensor": lambda p: p.path,
    }
    places = [
        (units[by](p), number)
        for number, fragment in enumerate(plan.fragments)
        for p in fragment
        if p.layer >= 0
    ]
    assert len(set(places)) == len(together)


def test_layers_go_round_the_fragments() -> None:
    shapes = {"wq": (8, 4, 4), "norm": (8, 4), "final_norm": (4,)}
    stacked = {"wq": ("layers", None, None), "norm": ("layers", None)}
    plan = plan_fragments(shapes, {**stacked, "final_norm": (None,)}, 3, "layer")
    layers = [sorted({p.layer for p in own} - {-1}) for own in plan.fragments]
    assert layers == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert "final_norm" in {p.name for p in plan.fragments[2]}, "the emptiest"


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


STACKED = {"w": (2, 4), "w/0": (4,)}


@pytest.mark.parametrize(
    ("shapes", "axes", "how", "said"),
    [
        (SHAPES, AXES, (0,), "fragments = 0.* 8 pieces"),
        (SHAPES, AXES, (9,), "fragments = 9.* 8 pieces"),
        (SHAPES, AXES, (6, "layer"), "= 6, but by layer .* 5 fragments of 8.* by size"),
        (SHAPES, AXES, (5, "tensor"), "= 5, but by tensor .* 4 fragments .* by size"),
        (SHAPES, AXES, (2, "depth"), "by = 'depth'; choose from size, layer, ten"),
        (SHAPES, {**AXES, "blocks": {"wq": ()}}, (2,), "blocks: shapes have the keys"),
        (SHAPES, {**AXES, "final_norm": ("a", "b")}, (2,), "final_norm: shape"),
        (
            STACKED,
            {"w": ("layers", None), "w/0": (None,)},
            (2,),
            "3 pieces have only 2 names",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_named(shapes, axes, how, said) -> None:
    with pytest.raises(ValueError, match=said):
        plan_fragments(shapes, axes, *how)


def test_from_pieces_names_what_is_wrong() -> None:
    plan = plan_fragments(SHAPES, AXES, 3)
    arrays = to_pieces(plan, params())
    with pytest.raises(ValueError, match="shape \\(2,\\)"):
        from_pieces(plan, {**arrays, "final_norm": np.zeros(2)})
    del arrays["embed"]
    with pytest.raises(ValueError, match="missing \\['embed'\\]"):
        from_pieces(plan, arrays)


def test_array_digest_sees_values_and_not_layout() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert digest_arrays([x]) == digest_arrays([jnp.asarray(x)])
    assert digest_arrays([x.T]) == digest_arrays([np.ascontiguousarray(x.T)])
    assert digest_arrays([x]) != digest_arrays([x + 1])
    whole = np.concatenate([x.ravel(), x.ravel()])
    assert digest_arrays([x, x]) == f"xxh3-128:{files.digest_of(whole)}"
    assert sha256_arrays([x, x]) == hashlib.sha256(whole.tobytes()).hexdigest()


EXTENTS = st.sampled_from((1, 2, 3, 7, 16, 48, 128, 257))


def cut_all(_: Piece) -> bool:
    return True


@given(st.lists(EXTENTS, min_size=1, max_size=2), st.integers(1, 40), st.booleans())
def test_pieces_hold_every_element_once_and_make_the_tensor_again(
    shape: list[int], fragments: int, stacked: bool
) -> None:
    own = (2, *shape) if stacked else tuple(shape)
    given_shapes = {"w": own, "v": (fragments, 8)}
    names = (("layers",) if stacked else ()) + ("embed",) * len(shape)
    axes = {"w": names, "v": ("layers", "embed")}
    plan = plan_fragments(given_shapes, axes, fragments, may_cut=cut_all)
    numbers = {
        name: np.arange(math.prod(extents)).reshape(extents)
        for name, extents in given_shapes.items()
    }
    pieces = to_pieces(plan, numbers)
    assert len(pieces) == len(plan.pieces)
    for piece in plan.pieces:
        assert pieces[piece.name].shape == piece.shape
    seen = np.concatenate([v.ravel() for n, v in pieces.items() if n[0] == "w"])
    np.testing.assert_array_equal(np.sort(seen), np.arange(math.prod(own)))
    np.testing.assert_array_equal(from_pieces(plan, pieces)["w"], numbers["w"])


@pytest.mark.parametrize("rows", [262_144, 256_128, 151_936, 128_256, 32_000])
def test_bands_of_common_vocabularies_have_a_part_on_every_device(rows: int) -> None:
    shape, limit = (rows, 4096), 30e6
    bands = Bands.of(shape, limit)
    assert bands.stripes >= 16
    assert (bands.stripes * bands.rows).bit_count() == 1
    own = list(bands.shapes(shape))
    assert sum(band[0] for band in own) == rows
    assert all(band[0] % bands.stripes == 0 for band in own)
    assert max(map(math.prod, own)) <= limit


def test_the_digest_knows_the_bands() -> None:
    shapes, axes = {"w": (1024, 16)}, {"w": ("vocab", "embed")}
    cut = plan_fragments(shapes, axes, 8, may_cut=cut_all)
    names = {piece.name for piece in cut.pieces}
    assert "w/band-10" in names
    assert len(names) == len(cut.pieces)
    fewer = plan_fragments(shapes, axes, 4, may_cut=cut_all)
    assert cut.digest() != fewer.digest()


@pytest.mark.parametrize("by", ["layer", "tensor"])
def test_other_ways_keep_tensors_whole(by: str) -> None:
    axes = {"w": ("vocab", "embed"), "v": ("embed",)}
    plan = plan_fragments({"w": (1024, 16), "v": (16,)}, axes, 2, by, cut_all)
    assert not any(piece.bands for piece in plan.pieces)


def test_more_fragments_than_pieces_are_refused_with_a_number_that_will_do() -> None:
    shapes, axes = {"w": (4, 8), "v": (8,)}, {"w": (None,) * 2, "v": (None,)}
    with pytest.raises(ValueError, match="between 1 and ") as refused:
        plan_fragments(shapes, axes, 100, may_cut=cut_all)
    most = int(str(refused.value).split("between 1 and ")[1])
    plan_fragments(shapes, axes, most, may_cut=cut_all)


@pytest.mark.parametrize("name", ["mean", "trimmed_mean"])
def test_bands_merge_as_the_whole_tensor_bit_for_bit(name: str) -> None:
    rng, weights, rule = (
        np.random.default_rng(0),
        [1.0, 2.0, 5.0],
        MERGE_RULES.find(name),
    )
    deltas = [rng.standard_normal((2048, 24)).astype("<f4") for _ in weights]
    plan = plan_fragments(
        {"w": (2048, 24)}, {"w": ("mlp", None)}, 6, may_cut=lambda p: may_cut(p, rule)
    )
    assert len(plan.pieces) > 6
    merged = {}
    for piece in plan.pieces:
        own = [get_piece({"w": d}, piece) for d in deltas]
        merged[piece.name] = np.asarray(merge_deltas(own, weights, rule))
    whole = merge_deltas(deltas, weights, rule)
    np.testing.assert_array_equal(from_pieces(plan, merged)["w"], whole)


class Own(Whole):
    """A rule that needs whole tensors, embeddings too."""

    embeddings_by_mean = False


def test_a_rule_decides_what_is_cut() -> None:
    matrix, embedding = (Piece(("w",), -1, (8, 4), e) for e in (False, True))
    rda, trimmed = MERGE_RULES.find("rda"), MERGE_RULES.find("trimmed_mean")
    cut = [may_cut(matrix, rule) for rule in (rda, trimmed, MEAN, Own())]
    assert cut == [False, True, True, False]
    assert [may_cut(embedding, rule) for rule in (rda, Own())] == [True, False]
