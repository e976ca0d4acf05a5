"""Delta, publish and adopt rules, by value: the delta points from the island's
values to the anchor, and anchors are the same on both sides. Then the contract of every
adopt rule, by the facts that it states."""

import jax.numpy as jnp
import numpy as np
import pytest
from family_members import brief, names
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import publish

from diloco_jax.core.changes import adopt, apply_publish, delta, moved
from diloco_jax.core.codecs import SMALLEST_NORMAL, get_codec
from diloco_jax.core.families import ADOPT_RULES, AdoptRule

LOCAL, BASE = np.float32([5.0, 1.0]), np.float32([4.0, 1.0])
ANCHOR = np.float32([10.0, 20.0])
SHAPE = (8, 40)


@pytest.mark.parametrize(
    ("rule", "alpha", "expected"),
    [
        ("keep", 0.5, [11.0, 20.0]),
        ("rebase", 0.5, [11.0, 20.0]),
        ("overwrite", 0.5, [10.0, 20.0]),
        ("blend", 0.75, [6.25, 5.75]),
        ("blend", 0.0, [10.0, 20.0]),
        ("blend", 1.0, [5.0, 1.0]),
    ],
)
def test_rules(rule: str, alpha: float, expected: list[float]) -> None:
    result = adopt(ADOPT_RULES.find(rule), LOCAL, BASE, ANCHOR, alpha)
    np.testing.assert_array_equal(result, expected)


def test_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="no adopt rule 'merge'"):
        ADOPT_RULES.find("merge")


def test_delta_is_anchor_minus_local_in_f32() -> None:
    anchor, local = np.float32([1.0, 2.0]), jnp.asarray([0.5, 3.0], jnp.bfloat16)
    result = delta(anchor, local)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, [0.5, -1.0])


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
    theta = anchor = np.zeros(SHAPE, np.float32)
    for step in steps:
        theta = theta + step
        anchor = publish(codec, theta, anchor)[1]
    assert np.abs(theta - anchor).max() < 0.5 * np.abs(steps).max()
    for _ in range(8):
        anchor = publish(codec, theta, anchor)[1]
    np.testing.assert_allclose(anchor, theta, atol=1e-4)


def test_anchors_have_no_subnormals() -> None:
    anchor = np.full(SHAPE, SMALLEST_NORMAL * 1.5, np.float32)
    codec = get_codec("f32")
    change = codec.encode(np.full(SHAPE, -SMALLEST_NORMAL, np.float32))
    assert not np.any(apply_publish(codec, anchor, change))


# ---- every adopt rule ---------------------------------------------------------------

ALPHA = 0.25


@pytest.fixture(params=names(ADOPT_RULES, "adopt"), ids=brief)
def rule(request: pytest.FixtureRequest) -> AdoptRule:
    """Every member."""
    return ADOPT_RULES.find(request.param)


def drawn() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((4, 3, 5)).astype(np.float32))


def test_what_an_adoption_makes_is_what_the_rule_says_of_itself(rule) -> None:
    local, base, anchor, step = drawn()
    found = adopt(rule, local, base, anchor, ALPHA)
    assert (found.shape, found.dtype) == (local.shape, jnp.float32)
    same = adopt(rule, anchor, anchor, anchor, ALPHA)
    np.testing.assert_allclose(same, anchor, rtol=1e-6)
    later = adopt(rule, local + step, base, anchor, ALPHA)
    assert np.array_equal(later, found) == rule.loses_steps
    if rule.adopts_first:
        # As much is between local and anchor as was between local and base.
        np.testing.assert_allclose(found - anchor, local - base, rtol=1e-4, atol=1e-5)
    assert not (rule.keeps_pending and rule.loses_steps)
    assert not rule.keeps_pending or rule.adopts_first


def test_a_kept_delta_leaves_with_the_version_that_has_it(rule: AdoptRule) -> None:
    """Adopted beside it, and then in its place: as if both had come at once."""
    local, base, anchor, between = drawn()
    if rule.keeps_pending:
        first = np.zeros_like(base)
        kept, kept_base = (moved(x, first, between) for x in (local, base))
        at_last = adopt(rule, kept, kept_base, anchor, ALPHA)
        at_once = adopt(rule, local, base, anchor, ALPHA)
        np.testing.assert_allclose(at_last, at_once, rtol=1e-4, atol=1e-5)
