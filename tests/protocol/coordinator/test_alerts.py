"""Islands that live but train alone are told of, once."""

import pytest
from kit import make_config
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.alerts import (
    MISSED_MERGES,
    SOLO_MERGES,
    WATCHED_MERGES,
    after_merge,
    in_turns,
)
from diloco_jax.protocol.coordinator.islands import Island, Islands
from diloco_jax.protocol.coordinator.state import Account, Fragment, Turn, initial
from diloco_jax.protocol.values import Contribution, Version


def fragment(solo=0, missed=0):
    accounts = {
        "a": Account(incarnation=1, session="a", tokens_per_step=1),
        "b": Account(
            incarnation=1, session="a1", tokens_per_step=1, missed_merges=missed
        ),
    }
    return Fragment(index=3, accounts=accounts, solo_merges=solo)


ALONE = (
    Contribution(
        island="a", incarnation=1, tick=1, start=0, end=1, tokens=1, base=Version()
    ),
)


def raised(merged, live):
    """Return the alerts that a merge of a delta of "a" alone raises."""
    config = make_config()
    turn = Turn(config, initial(config), 0.0)
    after_merge(turn, merged, ALONE, live)
    return [alert.text for alert in turn.effects]


@pytest.mark.parametrize("row", [SOLO_MERGES - 1, SOLO_MERGES, SOLO_MERGES + 1])
def test_solo_merges_alert_once_per_row(row):
    texts = raised(fragment(solo=row), ("a", "b"))
    assert len(texts) == (row == SOLO_MERGES)
    assert all("'a' alone" in t and "sync.quorum" in t for t in texts)


@pytest.mark.parametrize("row", [MISSED_MERGES - 1, MISSED_MERGES])
def test_a_live_island_that_misses_merges_is_named_once(row):
    texts = raised(fragment(missed=row), ("a", "b"))
    assert len(texts) == (row == MISSED_MERGES)
    assert all("'b' is alive" in t and "fragment 3" in t for t in texts)


def test_an_absent_island_is_not_called_alive():
    assert raised(fragment(missed=MISSED_MERGES), ("a",)) == []


def merged_in_turns(
    *, merges=WATCHED_MERGES[0], were=5.0, pace=1.0, slow=1.0, index=0, **changes
):
    """Return the alerts on "a", in all 10 merges, and "b", in `were` of them."""
    config = make_config(**{"overlap_steps": 2, "grace": 0.8, **changes})
    islands = Islands(
        Island(
            name=name,
            incarnation=1,
            session=name,
            tokens_per_step=10,
            sequences_per_step=1,
            phase="training",
            step_seconds=seconds,
        )
        for name, seconds in (("a", pace), ("b", pace * slow))
    )
    accounts = {
        name: Account(
            incarnation=1,
            session=name,
            tokens_per_step=10,
            merges_in=count,
            merges_alive=10,
        )
        for name, count in (("a", 10), ("b", were))
    }
    fragment = Fragment(
        index=index,
        accounts=accounts,
        merges=merges,
        quorum_seconds=0.4,
        merge_seconds=1.2,
        transfer_seconds=0.3,
    )
    turn = Turn(config, replace(initial(config), islands=islands), 0.0)
    in_turns(turn, fragment)
    return [alert.text for alert in turn.effects]


def test_islands_merged_in_turns_are_told_of_with_what_would_help():
    [text] = merged_in_turns()
    assert "of 2 islands of about one speed, b were in 50% of the merges" in text
    assert "1.9 s of an overlap of 2 steps of 1 s" in text
    assert "sync.overlap_steps from 2 to 4" in text
    [text] = merged_in_turns(pace=2.0)
    assert "1.9 s of an overlap of 2 steps of 2 s" in text
    assert "sync.overlap_steps from 2 to 3" in text
    [text] = merged_in_turns(pace=0.5)
    assert "sync.overlap_steps from 2 to 8" in text
    [text] = merged_in_turns(grace=0.0)
    assert "for the next run, raise sync.grace from 0" in text
    [text] = merged_in_turns(grace_window="overlap")
    assert text.endswith('for the next run, leave sync.grace_window at "alike"')


@pytest.mark.parametrize(
    "fine",
    [
        {"were": 8},
        {"were": 7.5},
        {"merges": 9},
        {"merges": 11},
        {"slow": 5.0},
        {"index": 1},
    ],
    ids=str,
)
def test_islands_that_are_in_most_merges_or_much_slower_are_not(fine):
    assert merged_in_turns(**fine) == []
