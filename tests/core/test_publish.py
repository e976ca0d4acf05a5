"""Anchors are the same on both sides, and what a codec holds back is not lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.core.changes import apply_publish, publish
from diloco_jax.core.codecs import SMALLEST_NORMAL, get_codec

SHAPE = (8, 40)


@given(st.integers(0, 1000))
@settings(max_examples=10)
@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
def test_islands_make_the_coordinators_anchor(name: str, seed: int) -> None:
    codec, rng = get_codec(name), np.random.default_rng(seed)
    theta = rng.standard_normal(SHAPE).astype(np.float32)
    ours = theirs = np.zeros(SHAPE, np.float32)
    for _ in range(4):
        theta = theta + rng.standard_normal(SHAPE).astype(np.float32) * 0.1
        encoded, ours = publish(codec, theta, ours)
        theirs = apply_publish(codec, theirs, np.asarray(encoded))
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_what_was_held_back_comes_with_the_next_publishes(name: str) -> None:
    """Theta - A is the downward error feedback: nothing accumulates in it."""
    codec, rng = get_codec(name), np.random.default_rng(0)
    steps = rng.standard_normal((40, *SHAPE)).astype(np.float32)
    theta = anchor = sent = np.zeros(SHAPE, np.float32)
    for step in steps:
        theta = theta + step
        encoded, anchor = publish(codec, theta, anchor)
        sent = sent + np.asarray(codec.decode(encoded, SHAPE))
    np.testing.assert_allclose(anchor, sent, atol=1e-4)  # A telescopes
    assert np.abs(theta - anchor).max() < 0.5 * np.abs(steps).max()
    for _ in range(8):
        anchor = publish(codec, theta, anchor)[1]
    np.testing.assert_allclose(anchor, theta, atol=1e-4)


def test_anchors_have_no_subnormals() -> None:
    anchor = np.full(SHAPE, SMALLEST_NORMAL * 1.5, np.float32)
    codec = get_codec("f32")
    change = codec.encode(np.full(SHAPE, -SMALLEST_NORMAL, np.float32))
    assert not np.any(apply_publish(codec, anchor, change))
