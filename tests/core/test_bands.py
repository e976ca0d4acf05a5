"""Bands partition a tensor, whatever its shape, and merge as the whole would."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pieces import merge_deltas, set_piece, to_pieces

from diloco_jax.core.families import MERGE_RULES, Whole
from diloco_jax.core.fragments import (
    Bands,
    Piece,
    from_pieces,
    get_piece,
    plan_fragments,
)
from diloco_jax.core.merge_rules import MEAN
from diloco_jax.core.merging import may_cut

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


@pytest.mark.parametrize("layers", [(), (2,)])
def test_a_band_is_set_alone(layers: tuple[int, ...]) -> None:
    shape = (*layers, 1024, 16)
    axes = {"w": (("layers",) if layers else ()) + ("vocab", "embed")}
    plan = plan_fragments({"w": shape}, axes, 8, may_cut=cut_all)
    changed = plan.pieces[3]
    assert changed.band >= 0
    ones = np.ones(shape, np.float32)
    tree = set_piece({"w": ones}, changed, jnp.zeros(changed.shape))
    for piece in plan.pieces:
        assert np.all(np.asarray(get_piece(tree, piece)) == (piece != changed))


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


def test_rows_that_divide_by_nothing_are_cut_too() -> None:
    bands = Bands.of((50_257, 64), 64 * 1000)
    assert bands == Bands(axis=-2, stripes=1, rows=512)
    assert [b[0] for b in bands.shapes((50_257, 64))] == [512] * 98 + [81]


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
