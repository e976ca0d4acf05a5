"""Mixtures: every position is one row of one source, in the shares that were asked."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.data.loading import Mixture
from diloco_jax.data.source import MOST_SLOTS, TOKENS, Shares, Together, slots_of

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=7)


class Numbered:
    """A source whose rows say which they are."""

    def __init__(self, source, rows):
        self.fields = {"tokens": TOKENS}
        self._source, self._rows = source, rows

    def __len__(self):
        return self._rows

    def __getitem__(self, row):
        assert 0 <= row < self._rows
        return {"tokens": np.array([self._source, row], np.int32)}


def drawn(mixture, positions):
    return [tuple(map(int, mixture[p]["tokens"])) for p in positions]


@given(WEIGHTS, st.integers(0, 10**12))
def test_a_position_and_a_draw_are_each_others_inverse(weights, start):
    shares = Shares(weights)
    for position in range(start, start + 2 * shares.period):
        source, draw = shares.draw(position)
        assert shares.position(source, draw) == position
    assert shares.position(*shares.draw(start)) == start
    for source in range(len(weights)):
        assert shares.draw(shares.position(source, start)) == (source, start)


@given(WEIGHTS, st.data())
def test_shares_are_those_of_the_weights(weights, data):
    shares, total = Shares(weights), sum(weights)
    counts = np.zeros(len(weights))
    deviations = []
    for position in range(2 * shares.period):
        counts[shares.draw(position)[0]] += 1
        deviations.append(counts - (position + 1) * np.array(weights) / total)
    deviations = np.array(deviations)
    # From the first position on: less than one row off, in any window than two.
    assert np.abs(deviations).max() < 1
    assert (deviations.max(axis=0) - deviations.min(axis=0)).max() < 2
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, 3 * shares.period)] * 2)))
    found = Counter(shares.draw(p)[0] for p in range(a, b))
    assert shares.drawn(a, b) == [found[s] for s in range(len(weights))]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(0, 99),
)
@settings(max_examples=8)
def test_each_row_is_drawn_once_in_each_epoch_of_its_source(sources, seed):
    weights, rows = zip(*sources, strict=True)
    shares = Shares(weights)
    mixture = Mixture([Numbered(*s) for s in enumerate(rows)], shares, seed)
    found = drawn(mixture, range(3 * max(rows) * shares.period))
    for source, count in enumerate(rows):
        mine = [row for s, row in found if s == source]
        epochs = [mine[i : i + count] for i in range(0, len(mine), count)]
        assert len(epochs) >= 3
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])
    # Reading in another order, or by others, changes nothing.
    other = Mixture([Numbered(*s) for s in enumerate(rows)], shares, seed)
    assert drawn(other, reversed(range(len(found)))) == found[::-1]


def test_a_source_begins_anew_in_another_order_and_with_another_seed():
    def orders(seed):
        sources = [Numbered(0, 50), Numbered(1, 50)]
        found = drawn(Mixture(sources, Shares([1, 1]), seed), range(200))
        mine = [[r for s, r in found if s == source] for source in (0, 1)]
        return [tuple(part) for rows in mine for part in (rows[:50], rows[50:])]

    assert len(set(orders(0) + orders(1)[:1])) == 5


def test_weights_become_whole_numbers():
    assert slots_of([0.7, 0.3]) == (7, 3)
    assert slots_of([2, 4, 6]) == (1, 2, 3)
    assert slots_of([5.0]) == (1,)
    large = slots_of([123_456_789, 987_654_321, 55_555_555])
    assert sum(large) == MOST_SLOTS
    exact = np.array([123_456_789, 987_654_321, 55_555_555]) / 1_166_666_665
    assert np.abs(np.array(large) - exact * MOST_SLOTS).max() < 1
    with pytest.raises(ValueError, match="weight 1 is less than 1 in 10000 of their"):
        slots_of([1, 100_000])


def test_sources_together_are_their_rows_in_order():
    together = Together([Numbered(0, 3), Numbered(1, 1), Numbered(2, 2)])
    want = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert drawn(together, range(len(together))) == want
    with pytest.raises(IndexError, match="row 6 of 6"):
        together[6]
