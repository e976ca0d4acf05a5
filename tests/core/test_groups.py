"""Groups of a piece: experts, of which no tile and no band has a part of two; and
weights by use of the rows of its first axis."""

import dataclasses

import numpy as np
import pytest

from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import (
    Bands,
    Piece,
    from_pieces,
    get_piece,
    plan_fragments,
)
from diloco_jax.core.tiles import TileGrid

EXPERTS = 6


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array whose values are the number of the expert."""
    rows = np.arange(shape[0], dtype=np.float32)
    return np.broadcast_to(rows.reshape(-1, *(1,) * (len(shape) - 1)), shape)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((8, 16, 8), (1, 16, 8)), ((6, 64, 96), (1, 32, 24)), ((5, 7), (1, 7))],
)
def test_no_tile_has_two_groups(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    grid = TileGrid.of(shape, shape[0])
    assert (grid.tile, grid.shape) == (tile, shape)
    tiles = grid.to_tiles(numbered(shape))
    assert (tiles == tiles[:, :1]).all()
    np.testing.assert_array_equal(grid.from_tiles(tiles), numbered(shape))


def test_a_large_expert_takes_no_bits_of_the_scale_of_a_small_one() -> None:
    codec, shape = get_codec("int8"), (4, 16, 8)
    x = np.full(shape, 1e-3, np.float32)
    x[0] = 1e3
    apart = codec.decode(codec.encode(x, 4), shape, 4)
    np.testing.assert_allclose(apart, x, rtol=0.01)
    # A tile of all has blocks of two experts, and one scale would lose the small one.
    assert not np.asarray(codec.decode(codec.encode(x), shape))[1].any()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_bands_have_whole_experts_or_the_same_part_of_each(
    layers: int, whole: bool
) -> None:
    shape = (layers, EXPERTS, 32, 16)
    plan = plan_fragments(
        {"up": shape},
        {"up": ("layers", "expert", "embed", "mlp")},
        layers * (2 if whole else 12),
        may_cut=lambda piece: True,
    )
    values = np.broadcast_to(numbered((EXPERTS, 32, 16)), shape)
    for piece in plan.pieces:
        found = get_piece({"up": values}, piece)
        assert piece.bands is not None
        assert piece.groups == piece.shape[0] == len(found)
        assert (found == found[:, :1, :1]).all()
        assert (piece.groups < EXPERTS, piece.shape[1:] == (32, 16)) == (whole, whole)
    arrays = {piece.name: get_piece({"up": values}, piece) for piece in plan.pieces}
    np.testing.assert_array_equal(from_pieces(plan, arrays)["up"], values)


def test_a_mesh_of_experts_cuts_every_band_alike() -> None:
    bands = Bands.of((64, 32, 16), 8 * 32 * 16, 64)
    assert (bands.axis, bands.stripes) == (-3, 8)


def test_groups_are_a_part_of_the_plan() -> None:
    piece = Piece(("up",), -1, (EXPERTS, 32, 16), False, groups=EXPERTS)
    (fragment,) = plan_fragments(
        {"up": piece.shape}, {"up": ("expert", "embed", "mlp")}, 1
    ).fragments
    assert fragment == (piece,)
    plain = plan_fragments({"up": piece.shape}, {"up": (None, "embed", "mlp")}, 1)
    assert plain.pieces == (dataclasses.replace(piece, groups=1),)
    alike = dataclasses.replace(plain, fragments=(fragment,))
    assert plain.digest() != alike.digest()
