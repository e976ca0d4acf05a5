"""Each bundled codec by its formula: errors, bytes, where they lie. What holds for all
of them is in `test_codec_contract.py`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.core.codecs import get_codec
from diloco_jax.core.tiles import TileGrid

NAMES = ("f32", "bf16", "int8", "int4")
SHAPE = (40, 100)  # tiles of (20, 50): 1000 elements, the last block is cut
BLOCK = {"int8": 256, "int4": 32}
PEAK = {"int8": 127, "int4": 7}


def sample(seed: int, exponent: float, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Heavy tails around 10**exponent, some blocks empty."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, shape) * 10.0**exponent
    x[rng.random(shape) < 0.1] = 0.0
    return np.clip(x, -1e38, 1e38).astype(np.float32)


def roundtrip(name: str, x: np.ndarray) -> np.ndarray:
    codec = get_codec(name)
    return np.asarray(codec.decode(codec.encode(x), x.shape))


def block_maxima(name: str, x: np.ndarray) -> np.ndarray:
    """For every element, the largest magnitude in its block."""
    grid, block = TileGrid.of(x.shape), BLOCK[name]
    tiles = grid.split(np.abs(x))
    starts = np.arange(0, tiles.shape[-1], block)
    widths = np.diff([*starts, tiles.shape[-1]])
    maxima = np.repeat(np.maximum.reduceat(tiles, starts, axis=-1), widths, axis=-1)
    return grid.join(maxima)


@given(st.integers(0, 1000), st.floats(-30, 30))
@settings(max_examples=25)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_error_is_half_a_step_of_the_block(
    name: str, seed: int, exponent: float
) -> None:
    x = sample(seed, exponent)
    error = np.abs(roundtrip(name, x) - x)
    assert np.all(error <= block_maxima(name, x) / PEAK[name] * 0.51)


@given(st.integers(0, 1000), st.floats(-30, 30))
@settings(max_examples=25)
def test_floats_round_to_nearest_even(seed: int, exponent: float) -> None:
    x = sample(seed, exponent)
    np.testing.assert_array_equal(roundtrip("f32", x), x)
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    expected = nearest.astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(roundtrip("bf16", x), expected)


def test_int4_planes_and_scales_lie_as_documented() -> None:
    x = np.zeros(64, np.float32)
    x[0], x[32], x[33] = 7.0, -14.0, 6.0
    encoded = np.asarray(get_codec("int4").encode(x))[0]
    assert encoded.shape == (32 + 2 * 2,)
    assert encoded[0] == 0x90 | 0x07  # element 32 is -7 = 0x9, element 0 is 7
    assert encoded[1] == 0x30  # element 33 is 6 / 2
    scales = encoded[32:].view(np.uint16)
    assert scales.tolist() == [0x3F80, 0x4000]  # 1.0 and 2.0 in bf16


def test_int8_scale_follows_the_payload() -> None:
    x = np.zeros(257, np.float32)
    x[0], x[256] = 127.0, -254.0
    encoded = np.asarray(get_codec("int8").encode(x))[0]
    assert encoded.shape == (257 + 2 * 2,)
    assert encoded[[0, 1, 256]].tolist() == [127, 0, 256 - 127]
    assert encoded[257:].view(np.uint16).tolist() == [0x3F80, 0x4000]


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=3).map(tuple))
def test_bytes_per_parameter(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    if size < 32768:
        shape, size = (*shape, 32768), size * 32768
    for name, limit in (("f32", 4), ("bf16", 2), ("int8", 1.03), ("int4", 0.60)):
        total = np.prod([float(n) for n in get_codec(name).encoded_shape(shape)])
        assert total / size <= limit


def test_wrong_shapes_and_names_are_named() -> None:
    codec = get_codec("int8")
    with pytest.raises(ValueError, match=r"\(2, 2, 1008\), got \(2, 2, 7\)"):
        codec.decode(np.zeros((2, 2, 7), np.uint8), SHAPE)
    with pytest.raises(
        ValueError, match=r"'int3' \(did you mean 'int8'\?\); choose from f32, bf16"
    ):
        get_codec("int3")
