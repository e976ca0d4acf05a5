"""Ranges as sets: the same as sets of numbers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.protocol import values
from diloco_jax.protocol.values import Span

RANGES = st.lists(st.builds(Span, st.integers(0, 30), st.integers(0, 30)), max_size=6)


def numbers(found) -> set[int]:
    return {number for span in found for number in range(span.start, span.stop)}


@given(RANGES, RANGES)
def test_they_are_sets_of_numbers(some, others):
    for found, expected in (
        (values.join_spans(some), numbers(some)),
        (values.spans_without(some, others), numbers(some) - numbers(others)),
        (values.common_spans(some, others), numbers(some) & numbers(others)),
    ):
        assert numbers(found) == expected
        assert list(found) == sorted(found)


@given(RANGES)
def test_joined_ranges_do_not_touch(some):
    found = values.join_spans(some)
    assert all(a.stop < b.start for a, b in itertools.pairwise(found))
    assert all(span.start < span.stop for span in found)
