"""Tiles cover an array exactly and follow from its shape alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.core.tiles import DIGEST_BYTES, TileGrid, tile_digests

shapes = st.lists(st.integers(1, 700), min_size=0, max_size=3).map(tuple)


@given(shapes)
def test_tiles_fill_the_array_and_are_small_or_odd(shape: tuple[int, ...]) -> None:
    grid = TileGrid.of(shape)
    assert tuple(g * t for g, t in zip(grid.grid, grid.tile, strict=True)) == tuple(
        shape
    )
    limit = min(max(math.prod(shape) / 256, 1024), 16384)
    assert grid.elements <= limit or all(extent % 2 for extent in grid.tile)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((), ()),
        ((7,), (7,)),
        ((1024,), (1024,)),
        ((1026,), (513,)),
        ((64, 64), (32, 32)),
        ((256, 64), (64, 16)),
        ((257, 192), (257, 3)),
        ((257, 257), (257, 257)),
        ((4096, 4096), (128, 128)),
        ((192, 6, 32), (24, 3, 8)),
    ],
)
def test_tiling_is_part_of_the_format(
    shape: tuple[int, ...], tile: tuple[int, ...]
) -> None:
    assert TileGrid.of(shape).tile == tile


@given(st.sampled_from([(), (5,), (2048,), (64, 96), (6, 64, 10), (257, 192)]))
def test_join_undoes_split(shape: tuple[int, ...]) -> None:
    x = np.arange(math.prod(shape)).reshape(shape)
    grid = TileGrid.of(shape)
    np.testing.assert_array_equal(grid.join(grid.split(x)), x)
    if shape == (64, 96):
        np.testing.assert_array_equal(grid.split(x)[1, 0], x[32:, :24].ravel())


def test_an_array_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 0\) has no elements"):
        TileGrid.of((3, 0))


def test_a_digest_is_of_one_tile_and_its_bits():
    tiles = np.random.default_rng(0).normal(size=(3, 2, 8)).astype("<f4")
    found = tile_digests(tiles)
    assert found.shape == (3, 2, DIGEST_BYTES)
    changed = tiles.copy()
    changed.view(np.uint32)[2, 1, 3] ^= 1
    differs = (tile_digests(changed) != found).any(axis=-1)
    assert differs.tolist() == [[False, False], [False, False], [False, True]]
