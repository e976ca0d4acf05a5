"""The contract of every codec; of the bundled ones the formula, and where bytes lie."""

import jax
import numpy as np
import pytest
from family_members import brief, names
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.core.codecs import (
    SMALLEST_NORMAL,
    Codec,
    encode_with_feedback,
    get_codec,
)
from diloco_jax.core.families import CODECS
from diloco_jax.core.merging import Encoded
from diloco_jax.core.tiles import TileGrid

NAMES = names(CODECS, "codecs")
SHAPES = [(40, 100), (257,), (1,), (7, 13, 5), (64, 2048)]
SHAPE = SHAPES[0]  # tiles of (20, 50): 1000 elements, the last block is cut
BLOCK = {"int8": 256, "int4": 32, "int2": 32}
PEAK = {"int8": 127, "int4": 7, "int2": 1}
seeds, exponents = st.integers(0, 1000), st.floats(-30, 30)
some = settings(max_examples=15, deadline=None)


@pytest.fixture(params=NAMES, ids=brief)
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every member."""
    return Codec(request.param)


def sample(seed: int, exponent: float, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Heavy tails around 10**exponent, some elements zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, shape) * 10.0**exponent
    x[rng.random(shape) < 0.1] = 0.0
    return np.clip(x, -1e38, 1e38).astype(np.float32)


def roundtrip(codec: Codec, x: np.ndarray) -> np.ndarray:
    return np.asarray(codec.decode(codec.encode(x), x.shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_as_declared(codec: Codec, shape: tuple[int, ...]) -> None:
    encoded = codec.encode(sample(0, 0.0, shape))
    grid = TileGrid.of(shape)
    assert encoded.shape == (*grid.grid, codec.tile_bytes(grid.elements))
    assert encoded.dtype == np.uint8
    assert codec.decode(encoded, shape).shape == shape


@given(seeds, exponents)
@some
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_an_error_is_as_declared_and_is_made_once(name, seed, exponent) -> None:
    codec, x = Codec(name), sample(seed, exponent)
    grid, once = TileGrid.of(x.shape), roundtrip(codec, x)
    allowed = grid.join(np.asarray(codec.member.largest_error(grid.split(x))))
    assert np.all(np.abs(once - x) <= allowed)
    np.testing.assert_allclose(roundtrip(codec, once), once, rtol=2e-2, atol=0)


def test_zeros_stay_zeros(codec: Codec) -> None:
    np.testing.assert_array_equal(roundtrip(codec, np.zeros(SHAPE, np.float32)), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible_in_its_tile(codec: Codec, bad: float) -> None:
    x = sample(0, 0.0)
    x[39, 99] = bad
    encoded = codec.encode(x)
    assert not np.isfinite(Encoded(codec, x.shape, [encoded]).squares[0])
    decoded = np.asarray(codec.decode(encoded, x.shape))
    assert not np.isfinite(decoded[20:, 50:]).all()
    assert np.isfinite(decoded[:20]).all()


def test_subnormals_are_zeros_on_both_sides_and_of_foreign_bytes(codec: Codec) -> None:
    x = np.full(SHAPE, SMALLEST_NORMAL / 2, np.float32)
    x[::2] *= -1
    assert not roundtrip(codec, x).any()
    found = [roundtrip(codec, np.full(SHAPE, SMALLEST_NORMAL * 2, np.float32))]
    rng = np.random.default_rng(0)
    for low in (True, False):
        encoded = rng.integers(0, 256, codec.encoded_shape(SHAPE), np.uint8)
        encoded[..., 0::2] = encoded[..., 0::2] * (not low)
        found.append(np.asarray(codec.decode(encoded, SHAPE)))
    for decoded in map(np.abs, found):
        assert not np.any((decoded > 0) & (decoded < SMALLEST_NORMAL))


def test_a_tile_is_encoded_and_decoded_for_itself(codec: Codec) -> None:
    """So bytes do not depend on how an array is cut between hosts or devices."""
    x = sample(1, 0.0, (64, 2048))
    grid = TileGrid.of(x.shape)
    tiles = grid.to_tiles(x)
    encoded = np.asarray(codec.encode(x)).reshape(len(tiles), -1)
    decoded = grid.to_tiles(roundtrip(codec, x))
    for chosen in (slice(0, 1), slice(3, 7), slice(len(tiles) - 1, None)):
        alone = jax.jit(codec.member.encode)(tiles[chosen])
        np.testing.assert_array_equal(alone, encoded[chosen])
        back = codec.decode_tiles(encoded[chosen], grid.elements)
        np.testing.assert_array_equal(back, decoded[chosen])


def test_fusing_changes_no_bits(codec: Codec) -> None:
    x, base = sample(5, -3.0), sample(6, 0.0)

    @jax.jit
    def fused(x: jax.Array, base: jax.Array) -> tuple[jax.Array, jax.Array]:
        encoded, residual = encode_with_feedback(codec, x, base)
        return base + codec.decode(encoded, x.shape), residual

    encoded, residual = encode_with_feedback(codec, x, base)
    decoded = np.asarray(codec.decode(encoded, x.shape))
    together = fused(x, base)
    np.testing.assert_array_equal(together[0], base + decoded)
    np.testing.assert_array_equal(together[1], residual)
    np.testing.assert_array_equal(residual, (x + base) - decoded)


def test_feedback_brings_everything_across(codec: Codec) -> None:
    rounds, x = 60, sample(3, 0.0)
    residual, sent = np.zeros_like(x), np.zeros(x.shape, np.float64)
    for _ in range(rounds):
        encoded, residual = encode_with_feedback(codec, x, residual)
        sent += np.asarray(codec.decode(encoded, x.shape), np.float64)
    missing = rounds * x.astype(np.float64) - sent
    np.testing.assert_allclose(missing, residual, atol=1e-3 * np.abs(x).max())
    # What is kept back does not grow with the rounds.
    assert np.linalg.norm(residual) <= 0.5 * rounds * np.linalg.norm(x)


# ---- the bundled ones ---------------------------------------------------------------


def block_maxima(name: str, x: np.ndarray) -> np.ndarray:
    """For every element, the largest magnitude in its block."""
    grid, block = TileGrid.of(x.shape), BLOCK[name]
    tiles = grid.split(np.abs(x))
    starts = np.arange(0, tiles.shape[-1], block)
    widths = np.diff([*starts, tiles.shape[-1]])
    maxima = np.repeat(np.maximum.reduceat(tiles, starts, axis=-1), widths, axis=-1)
    return grid.join(maxima)


@given(seeds, exponents)
@some
def test_integers_and_floats_are_the_nearest_ones(seed: int, exponent: float) -> None:
    x = sample(seed, exponent)
    for name, peak in PEAK.items():
        error = np.abs(roundtrip(get_codec(name), x) - x)
        assert np.all(error <= block_maxima(name, x) / peak * 0.51)
    np.testing.assert_array_equal(roundtrip(get_codec("f32"), x), x)
    bits = x.view(np.uint32).astype(np.uint64)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    expected = even.astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(roundtrip(get_codec("bf16"), x), expected)


def test_planes_and_scales_lie_as_documented() -> None:
    x = np.zeros(64, np.float32)
    x[0], x[32], x[33] = 7.0, -14.0, 6.0
    encoded = np.asarray(get_codec("int4").encode(x))[0]
    assert encoded.shape == (32 + 2 * 2,)
    assert encoded[0] == 0x90 | 0x07  # element 32 is -7 = 0x9, element 0 is 7
    assert encoded[1] == 0x30  # element 33 is 6 / 2
    assert encoded[32:].view(np.uint16).tolist() == [0x3F80, 0x4000]  # 1 and 2 in bf16
    x = np.zeros(66, np.float32)
    x[[0, 17, 33]] = -2.0, 1.0, 1.0  # The scale is 1, and -1: the largest is -2.
    x[34:] = 6.0
    encoded = np.asarray(get_codec("int2").encode(x))[0]
    assert encoded.shape == (17 + 2 * 3,)
    # Elements 0, 17, 34 and 51 share the first byte: -2, 1, and twice -2.
    assert encoded[0] == 2 | 1 << 2 | 2 << 4 | 2 << 6
    assert encoded[16] == 0 | 0 << 2 | 2 << 4 | 0 << 6
    assert encoded[17:].view(np.uint16).tolist() == [0x3F80, 0xC040, 0xC040]
    x = np.zeros(257, np.float32)
    x[0], x[256] = 127.0, -254.0
    encoded = np.asarray(get_codec("int8").encode(x))[0]
    assert encoded.shape == (257 + 2 * 2,)
    assert encoded[[0, 1, 256]].tolist() == [127, 0, 256 - 127]
    assert encoded[257:].view(np.uint16).tolist() == [0x3F80, 0x4000]


def test_the_largest_of_a_block_is_kept_by_two_bits() -> None:
    """So nothing waits in the residual until it has grown over the others."""
    x = sample(4, 0.0)
    maxima, once = block_maxima("int2", x), roundtrip(get_codec("int2"), x)
    largest = (np.abs(x) == maxima) & (maxima > 0)
    np.testing.assert_allclose(once[largest], x[largest], rtol=2.0**-8)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=3).map(tuple))
def test_bytes_per_parameter(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    if size < 32768:
        shape, size = (*shape, 32768), size * 32768
    for name, limit in (
        ("f32", 4),
        ("bf16", 2),
        ("int8", 1.03),
        ("int4", 0.60),
        ("int2", 0.33),
    ):
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
