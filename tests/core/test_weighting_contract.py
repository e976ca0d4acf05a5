"""The contract of every weighting."""

import itertools
import math

import pytest
from family_members import brief, names
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.core.families import WEIGHTINGS
from diloco_jax.core.merge_rules import capped, weight

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


# ---- the cap on one island's share -------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=70), st.floats(0.01, 1.0))
def test_nobody_has_more_than_the_cap_if_there_are_enough(weights, most) -> None:
    found = capped(weights, most)
    shares = [w / math.fsum(found) for w in found]
    assert max(shares) <= max(most, 1 / len(weights)) * (1 + 1e-9)
    order = sorted(range(len(weights)), key=weights.__getitem__)
    assert all(found[a] <= found[b] for a, b in itertools.pairwise(order))
    if max(weights) <= most * math.fsum(weights):
        assert found == weights


def test_those_below_the_cap_keep_their_proportions() -> None:
    for weights, most, expected in (
        ([1.0, 1.0, 8.0], 0.5, [1.0, 1.0, 2.0]),
        ([1.0, 2.0, 3.0, 94.0], 0.4, [1.0, 2.0, 3.0, 4.0]),
        ([1.0, 1.0, 40.0, 58.0], 0.3, [1.0, 1.0, 1.5, 1.5]),
        ([3.0, 5.0], 1.0, [3.0, 5.0]),
    ):
        assert capped(weights, most) == pytest.approx(expected)


def test_with_too_few_for_the_cap_all_weigh_the_same() -> None:
    assert capped([1.0, 9.0], 0.4) == [1.0, 1.0]
    assert capped([7.0], 0.2) == [1.0]
    assert capped([0.0, 9.0], 0.4) == [0.0, 1.0], "an empty delta weighs nothing"
