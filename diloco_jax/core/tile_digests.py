"""Digests of a piece's tiles, by which an island checks values that another one sent.

SHA-256, since a peer may lie: it would have to find other values with the same digest.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32


def tile_digests(tiles: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the digest of each tile's values, as little-endian f32.

    Args:
      tiles: f32[*grid, elements].

    Returns:
      uint8[*grid, DIGEST_BYTES].
    """
    grid = tiles.shape[:-1]
    found = np.empty((*grid, DIGEST_BYTES), np.uint8)
    for index in np.ndindex(grid):
        values = np.ascontiguousarray(tiles[index], "<f4")
        found[index] = np.frombuffer(hashlib.sha256(values.data).digest(), np.uint8)
    return found
