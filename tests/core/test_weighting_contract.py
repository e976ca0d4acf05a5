"""The contract of every weighting."""

import math

import pytest
from family_members import brief, names
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.core.weighting import WEIGHTINGS, weight

NAMES = names(WEIGHTINGS, "weighting")
counts = st.integers(1, 10**15)


@given(counts, st.integers(1, 10**9))
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_a_delta_has_a_finite_weight_above_0(name, tokens, steps) -> None:
    assert 0 < weight(WEIGHTINGS.find(name), tokens, steps) < math.inf


@given(counts, st.integers(1, 10**9))
@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_more_tokens_in_as_many_steps_do_not_weigh_less(name, tokens, steps) -> None:
    weighting = WEIGHTINGS.find(name)
    assert weight(weighting, 2 * tokens, steps) >= weight(weighting, tokens, steps)


@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_an_empty_delta_weighs_nothing(name: str) -> None:
    weighting = WEIGHTINGS.find(name)
    assert weight(weighting, 0, 3) == weight(weighting, 5, 0) == 0
