"""Boxes of tiles, and digests of tiles, as a join compares them."""

import numpy as np

from diloco_jax.core.payload import Box, overlap, tiles_of, within
from diloco_jax.core.tiles import DIGEST_BYTES, tile_digests


def test_boxes_overlap_where_both_have_tiles():
    one, other = Box(1, (0, 2), (4, 6)), Box(1, (2, 0), (9, 3))
    assert overlap(one, other) == Box(1, (2, 2), (4, 3))
    assert overlap(one, Box(2, (0, 2), (4, 6))) is None
    assert overlap(one, Box(1, (4, 2), (5, 6))) is None
    grid = np.arange(36).reshape(6, 6)
    both = overlap(one, other)
    np.testing.assert_array_equal(
        grid[tiles_of(one)][tiles_of(within(both, one))], grid[tiles_of(both)]
    )


def test_a_digest_is_of_one_tile_and_its_bits():
    tiles = np.random.default_rng(0).normal(size=(3, 2, 8)).astype("<f4")
    found = tile_digests(tiles)
    assert found.shape == (3, 2, DIGEST_BYTES)
    changed = tiles.copy()
    changed.view(np.uint32)[2, 1, 3] ^= 1
    differs = (tile_digests(changed) != found).any(axis=-1)
    assert differs.tolist() == [[False, False], [False, False], [False, True]]
