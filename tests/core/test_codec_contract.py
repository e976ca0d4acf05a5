"""The contract of every codec."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from family_members import brief, names
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.core.codecs import SMALLEST_NORMAL, Codec, encode_with_feedback
from diloco_jax.core.families import CODECS
from diloco_jax.core.merging import Encoded
from diloco_jax.core.tiles import TileGrid

NAMES = names(CODECS, "codecs")
SHAPES = [(40, 100), (257,), (1,), (7, 13, 5), (64, 2048)]
SHAPE = SHAPES[0]


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


def square_of(codec: Codec, encoded: jax.Array, shape: tuple[int, ...]) -> float:
    return Encoded(codec, shape, [encoded]).squares[0]


def roundtrip(codec: Codec, x: np.ndarray) -> np.ndarray:
    return np.asarray(codec.decode(codec.encode(x), x.shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_as_declared(codec: Codec, shape: tuple[int, ...]) -> None:
    encoded = codec.encode(sample(0, 0.0, shape))
    grid = TileGrid.of(shape)
    assert encoded.shape == (*grid.grid, codec.tile_bytes(grid.elements))
    assert encoded.dtype == np.uint8
    assert codec.decode(encoded, shape).shape == shape


@given(st.integers(0, 1000), st.floats(-30, 30))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_no_element_is_further_off_than_the_codec_says(name, seed, exponent) -> None:
    codec, x = Codec(name), sample(seed, exponent)
    grid = TileGrid.of(x.shape)
    allowed = grid.join(np.asarray(codec.member.largest_error(grid.split(x))))
    assert np.all(np.abs(roundtrip(codec, x) - x) <= allowed)


@given(st.integers(0, 1000), st.floats(-30, 30))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_what_was_decoded_encodes_to_itself(name, seed, exponent) -> None:
    codec = Codec(name)
    once = roundtrip(codec, sample(seed, exponent))
    np.testing.assert_allclose(roundtrip(codec, once), once, rtol=2e-2, atol=0)


def test_zeros_stay_zeros(codec: Codec) -> None:
    np.testing.assert_array_equal(roundtrip(codec, np.zeros(SHAPE, np.float32)), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible_in_its_tile(codec: Codec, bad: float) -> None:
    x = sample(0, 0.0)
    assert np.isfinite(square_of(codec, codec.encode(x), x.shape))
    x[39, 99] = bad
    encoded = codec.encode(x)
    assert not np.isfinite(square_of(codec, encoded, x.shape))
    decoded = np.asarray(codec.decode(encoded, x.shape))
    assert not np.isfinite(decoded[20:, 50:]).all()
    assert np.isfinite(decoded[:20]).all()


def test_subnormals_are_zeros_on_both_sides(codec: Codec) -> None:
    x = np.full(SHAPE, SMALLEST_NORMAL / 2, np.float32)
    x[::2] *= -1
    assert not roundtrip(codec, x).any()
    decoded = np.abs(roundtrip(codec, np.full(SHAPE, SMALLEST_NORMAL * 2, np.float32)))
    assert np.all((decoded == 0) | (decoded >= SMALLEST_NORMAL))


def test_foreign_bytes_decode_without_subnormals(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    for low in (True, False):
        encoded = rng.integers(0, 256, codec.encoded_shape(SHAPE), np.uint8)
        encoded[..., 0::2] = encoded[..., 0::2] * (not low)
        decoded = np.abs(np.asarray(codec.decode(encoded, SHAPE)))
        assert not np.any((decoded > 0) & (decoded < SMALLEST_NORMAL))


def test_a_tile_is_encoded_and_decoded_for_itself(codec: Codec) -> None:
    """So bytes do not depend on how an array is cut between hosts or devices."""
    x = sample(1, 0.0, (64, 2048))
    grid = TileGrid.of(x.shape)
    tiles = grid.split(x).reshape(-1, grid.elements)
    encoded = np.asarray(codec.encode(x)).reshape(len(tiles), -1)
    decoded = grid.split(roundtrip(codec, x)).reshape(tiles.shape)
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


def test_sharded_on_tile_boundaries_needs_no_communication() -> None:
    """Four virtual devices, in a process of its own."""
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "NPROC": "16"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sharded_codec.py"), *NAMES],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert len(results) == 2 * len(NAMES)
    for result in results:
        case = result.pop("case")
        assert result == {
            "shards": 4,
            "collectives": [],
            "same_bytes": True,
            "same_rest": True,
            "same_values": True,
        }, case
