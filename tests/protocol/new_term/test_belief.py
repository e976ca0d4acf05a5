"""Anchors that islands offer for a new term: which of them the lead believes."""

import pytest

from diloco_jax.protocol.coordinator.gathering import MERGES_AHEAD, may_have_become
from diloco_jax.protocol.values import Version


@pytest.mark.parametrize(
    ("arrived", "may"),
    [
        (Version(2, 150), True),
        (Version(2, 151), True),
        (Version(2, 150 + MERGES_AHEAD), True),
        (Version(2, 151 + MERGES_AHEAD), False),
        (Version(2, 149), False),
        (Version(3, 151), False),
    ],
)
def test_an_anchor_may_be_some_merges_newer_than_it_was_offered(arrived, may):
    assert may_have_become(Version(2, 150), arrived) is may
