"""The contract of every adopt rule, by the facts that it states."""

import jax.numpy as jnp
import numpy as np
import pytest
from family_members import brief, names

from diloco_jax.core.changes import adopt, moved
from diloco_jax.core.families import ADOPT_RULES, AdoptRule

ALPHA = 0.25


@pytest.fixture(params=names(ADOPT_RULES, "adopt"), ids=brief)
def rule(request: pytest.FixtureRequest) -> AdoptRule:
    """Every member."""
    return ADOPT_RULES.find(request.param)


def drawn() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((4, 3, 5)).astype(np.float32))


def test_shape_and_dtype_stay(rule: AdoptRule) -> None:
    local, base, anchor, _ = drawn()
    found = adopt(rule, local, base, anchor, ALPHA)
    assert (found.shape, found.dtype) == (local.shape, jnp.float32)


def test_an_island_that_did_nothing_gets_the_anchor_if_adopted_first(rule) -> None:
    """`local` is the base: nothing was done since the take."""
    _, base, anchor, _ = drawn()
    if rule.adopts_first:
        np.testing.assert_allclose(adopt(rule, base, base, anchor, ALPHA), anchor)


def test_adopting_what_is_there_already_changes_nothing(rule: AdoptRule) -> None:
    _, _, anchor, _ = drawn()
    found = adopt(rule, anchor, anchor, anchor, ALPHA)
    np.testing.assert_allclose(found, anchor, rtol=1e-6)


def test_steps_since_the_take_have_an_effect_unless_the_rule_loses_them(rule) -> None:
    local, base, anchor, step = drawn()
    without = adopt(rule, local, base, anchor, ALPHA)
    found = adopt(rule, local + step, base, anchor, ALPHA)
    assert np.array_equal(found, without) == rule.loses_steps


def test_a_rule_that_adopts_first_keeps_all_of_the_steps(rule: AdoptRule) -> None:
    """As much is between local and anchor as was between local and base."""
    local, base, anchor, _ = drawn()
    found = adopt(rule, local, base, anchor, ALPHA) - anchor
    if rule.adopts_first:
        np.testing.assert_allclose(found, local - base, rtol=1e-4, atol=1e-5)


def test_a_kept_delta_leaves_with_the_version_that_has_it(rule: AdoptRule) -> None:
    """Adopted beside it, and then in its place: as if both had come at once."""
    local, base, anchor, between = drawn()
    if rule.keeps_pending:
        first = np.zeros_like(base)
        kept, kept_base = (moved(x, first, between) for x in (local, base))
        at_last = adopt(rule, kept, kept_base, anchor, ALPHA)
        at_once = adopt(rule, local, base, anchor, ALPHA)
        np.testing.assert_allclose(at_last, at_once, rtol=1e-4, atol=1e-5)


def test_what_it_says_of_itself_fits_together(rule: AdoptRule) -> None:
    assert not (rule.keeps_pending and rule.loses_steps)
    assert not rule.keeps_pending or rule.adopts_first
