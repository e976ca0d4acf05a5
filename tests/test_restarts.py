"""Crashes in a row, and what ends the row."""

import pytest

from diloco_jax.restarts import STEADY_S, crashes_in_a_row


@pytest.mark.parametrize(
    ("before", "ran_s", "now"),
    [
        (0, 0.0, 1),
        (3, STEADY_S - 0.1, 4),
        (3, STEADY_S, 1),
        (0, 10 * STEADY_S, 1),
    ],
)
def test_ten_minutes_end_a_row(before: int, ran_s: float, now: int) -> None:
    assert STEADY_S == 600
    assert crashes_in_a_row(before, ran_s) == now
