"""A payload is its pieces end to end, and parts of it are boxes of tiles."""

import math
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.coordinator.holding.inbox import Coverage
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import Box, PayloadLayout, plan_fragments
from diloco_jax.core.tiles import TileGrid

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


def test_wrong_lengths_name_both_values() -> None:
    with pytest.raises(ValueError, match="payload of 6198 bytes, the layout has 6199"):
        LAYOUT.unpack(bytes(6198))
    with pytest.raises(ValueError, match="2 arrays for a payload of 3 pieces"):
        LAYOUT.pack(encoded()[:2])
    wrong = [*encoded()[:2], np.zeros((2, 7), np.uint8)]
    with pytest.raises(ValueError, match=r"c is encoded as \(2, 7\).*\(2, 1032\)"):
        LAYOUT.pack(wrong)


@st.composite
def boxes(draw, placed: int) -> Box:
    grid = LAYOUT.placed[placed].encoded_shape[:-1]
    start = tuple(draw(st.integers(0, n - 1)) for n in grid)
    stop = tuple(
        draw(st.integers(low + 1, n)) for low, n in zip(start, grid, strict=True)
    )
    return Box(placed, start, stop)


def takes_no_more_than_all(part: list[Box]) -> bool:
    sizes = [(math.prod(b - a for a, b in zip(*box[1:], strict=True))) for box in part]
    tiles = [LAYOUT.placed[box.piece].tile_bytes for box in part]
    return sum(map(operator.mul, sizes, tiles)) <= LAYOUT.total_bytes


PARTS = st.lists(st.integers(0, 2).flatmap(boxes), max_size=4).filter(
    takes_no_more_than_all
)


@given(PARTS)
def test_a_part_comes_back_to_its_places(part: list[Box]) -> None:
    arrays = encoded()
    payload = LAYOUT.pack(arrays)
    octets = b"".join(cut.tobytes() for cut in LAYOUT.cut(payload, tuple(part)))
    assert len(octets) == LAYOUT.part_bytes(tuple(part))
    target = bytearray(LAYOUT.total_bytes)
    LAYOUT.scatter(target, tuple(part), octets)
    here = Coverage(LAYOUT)
    here.add(tuple(part))
    for i, (got, sent) in enumerate(zip(LAYOUT.unpack(target), arrays, strict=True)):
        np.testing.assert_array_equal(got[here._here[i]], sent[here._here[i]])
        assert not got[~here._here[i]].any()


@given(PARTS)
def test_values_of_a_part_are_those_of_its_tiles(part: list[Box]) -> None:
    rng = np.random.default_rng(0)
    shapes = [p.piece.shape for p in LAYOUT.placed]
    arrays = [rng.normal(size=TileGrid.of(s).in_order).astype("<f4") for s in shapes]
    cut = LAYOUT.cut_values(arrays, tuple(part))
    octets = b"".join(values.tobytes() for values in cut)
    whole = PayloadLayout.of(get_codec("f32"), PIECES)
    payload = b"".join(array.tobytes() for array in arrays)
    boxed = b"".join(tiles.tobytes() for tiles in whole.cut(payload, tuple(part)))
    assert octets == boxed, "as a payload of the codec f32"


def test_parts_cover_a_payload_when_every_tile_is_here() -> None:
    (grid_a, _, grid_c) = (p.encoded_shape[:-1] for p in LAYOUT.placed)
    assert (grid_a, grid_c) == ((2, 2), (2,))
    here = Coverage(LAYOUT)
    here.add((Box(0, (0, 0), (2, 1)), Box(1, (0,), (1,))))
    here.add((Box(0, (0, 0), (2, 1)), Box(2, (0,), (2,))))  # the same tiles once more
    assert not here.complete
    here.add((Box(0, (0, 1), (2, 2)),))
    assert here.complete
    whole = Coverage(LAYOUT)
    whole.add(())
    assert whole.complete


@pytest.mark.parametrize(
    "box",
    [Box(3, (0,), (1,)), Box(2, (0,), (3,)), Box(2, (1,), (0,)), Box(0, (0,), (1,))],
)
def test_tiles_that_are_not_there_are_named(box: Box) -> None:
    payload, arrays = (
        LAYOUT.pack(encoded()),
        [np.zeros(TileGrid.of(p.piece.shape).in_order) for p in LAYOUT.placed],
    )
    for refuse in (
        lambda: LAYOUT.part_bytes((box,)),
        lambda: LAYOUT.cut(payload, (box,)),
        lambda: LAYOUT.cut_values(arrays, (box,)),
    ):
        with pytest.raises(
            ValueError, match=r"Box\(piece=\d.* is not in a fragment of 3"
        ):
            refuse()


WHOLE, EMPTY = LAYOUT.boxes(()), Box(0, (0, 0), (0, 0))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (WHOLE * 3, "9 boxes, of a payload of 7 tiles"),
        (WHOLE * 2, "6 boxes and 12398 bytes"),
        ((WHOLE[0], EMPTY), "1 of them empty"),
    ],
)
def test_a_part_takes_no_more_than_its_payload(part, why) -> None:
    """A peer's, of a megabyte of boxes, cost seconds and gigabytes."""
    for refuse in (LAYOUT.part_bytes, lambda part: LAYOUT.cut(bytes(6199), part)):
        with pytest.raises(ValueError, match=why):
            refuse(part)
    assert LAYOUT.part_bytes((EMPTY,)) == 0, "of a host that has none"


def test_a_part_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a part of 7 bytes came with 6"):
        LAYOUT.scatter(bytearray(LAYOUT.total_bytes), (Box(1, (0,), (1,)),), bytes(6))
