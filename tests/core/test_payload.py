"""A payload is its pieces end to end, and byte ranges are ranges of tiles."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.core.codec import get_codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.payload import PayloadLayout, TileRange

SHAPES = {"a": (64, 64), "b": (5,), "c": (2048,)}
AXES = {"a": (None, None), "b": (None,), "c": (None,)}
(PIECES,) = plan_fragments(SHAPES, AXES, 1).fragments
LAYOUT = PayloadLayout.of(get_codec("int8"), PIECES)  # 4 x 1032, 7, 2 x 1032 bytes


def encoded() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, p.encoded_shape, np.uint8) for p in LAYOUT.placed]


def test_pack_and_unpack() -> None:
    arrays = encoded()
    payload = LAYOUT.pack(arrays)
    assert len(payload) == LAYOUT.total_bytes == 6 * 1032 + 7
    assert bytes(payload) == b"".join(a.tobytes() for a in arrays)
    for kind in (bytes, bytearray, memoryview):
        for view, array in zip(LAYOUT.unpack(kind(payload)), arrays, strict=True):
            np.testing.assert_array_equal(view, array)


def test_unpack_copies_nothing() -> None:
    payload = bytearray(LAYOUT.total_bytes)
    views = LAYOUT.unpack(payload)
    payload[LAYOUT.placed[1].offset] = 9
    assert views[1][0, 0] == 9


def test_wrong_lengths_name_both_values() -> None:
    with pytest.raises(ValueError, match="payload of 6198 bytes, the layout has 6199"):
        LAYOUT.unpack(bytes(6198))
    with pytest.raises(ValueError, match="2 arrays for a payload of 3 pieces"):
        LAYOUT.pack(encoded()[:2])
    wrong = [*encoded()[:2], np.zeros((2, 7), np.uint8)]
    with pytest.raises(ValueError, match=r"c is encoded as \(2, 7\).*\(2, 1032\)"):
        LAYOUT.pack(wrong)


@given(st.integers(0, LAYOUT.total_bytes), st.integers(0, LAYOUT.total_bytes))
def test_byte_ranges_are_covered_by_their_tiles(one: int, two: int) -> None:
    start, stop = min(one, two), max(one, two)
    ranges = [LAYOUT.byte_range(tiles) for tiles in LAYOUT.tiles_in(start, stop)]
    if start == stop:
        assert not ranges
        return
    assert ranges[0][0] <= start
    assert stop <= ranges[-1][1]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    first, last = LAYOUT.tiles_in(start, stop)[0], LAYOUT.tiles_in(start, stop)[-1]
    assert start - ranges[0][0] < LAYOUT.placed[first.piece].tile_bytes
    assert ranges[-1][1] - stop < LAYOUT.placed[last.piece].tile_bytes


def test_tiles_by_byte() -> None:
    assert LAYOUT.tiles_in(1032, 2064) == [TileRange(0, 1, 2)]
    assert LAYOUT.tiles_in(4127, 4136) == [
        TileRange(0, 3, 4),
        TileRange(1, 0, 1),
        TileRange(2, 0, 1),
    ]
    assert LAYOUT.byte_range(TileRange(2, 1, 2)) == (4128 + 7 + 1032, 6199)
    with pytest.raises(ValueError, match=r"\[0, 6200\) are not in a payload of 6199"):
        LAYOUT.tiles_in(0, 6200)
    with pytest.raises(ValueError, match=r"tiles \[1, 3\) of c, which has 2"):
        LAYOUT.byte_range(TileRange(2, 1, 3))
