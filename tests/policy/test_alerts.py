"""Islands that live but train alone are told of, once."""

import dataclasses

import pytest

from diloco_jax.policy.alerts import MISSED_MERGES, SOLO_MERGES, after_merge
from diloco_jax.policy.events import Contribution, Version
from diloco_jax.policy.state import Account, Fragment


def fragment(solo=0, missed=0):
    accounts = {
        "a": Account(incarnation=1, tokens_per_step=1),
        "b": Account(incarnation=1, tokens_per_step=1, missed_merges=missed),
    }
    return Fragment(index=3, accounts=accounts, solo_merges=solo)


ALONE = (
    Contribution(
        island="a", incarnation=1, tick=1, start=0, end=1, tokens=1, base=Version()
    ),
)


@pytest.mark.parametrize("row", [SOLO_MERGES - 1, SOLO_MERGES, SOLO_MERGES + 1])
def test_solo_merges_alert_once_per_row(row):
    texts = [e.text for e in after_merge(fragment(solo=row), ALONE, ("a", "b"))]
    assert len(texts) == (row == SOLO_MERGES)
    assert all("'a' alone" in t and "sync.quorum" in t for t in texts)


@pytest.mark.parametrize("row", [MISSED_MERGES - 1, MISSED_MERGES])
def test_a_live_island_that_misses_merges_is_named_once(row):
    texts = [e.text for e in after_merge(fragment(missed=row), ALONE, ("a", "b"))]
    assert len(texts) == (row == MISSED_MERGES)
    assert all("'b' is alive" in t and "fragment 3" in t for t in texts)


def test_an_absent_island_is_not_called_alive():
    lagging = fragment(missed=MISSED_MERGES)
    assert after_merge(dataclasses.replace(lagging), ALONE, ("a",)) == []
