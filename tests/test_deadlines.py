"""Pauses between attempts."""

from diloco_jax.config.placement import Deadlines
from diloco_jax.wire.peers import Backoff

DEADLINES = Deadlines(100.0)


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(*DEADLINES.retries_s)
    assert [backoff.next_s() for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_who_starts_first_does_not_wait_for_long_whatever_the_budget():
    assert Deadlines(10.0).retry_min_s == 0.1
    assert Deadlines(600.0).retry_min_s == 0.5


def test_earlier_failures_count():
    assert Backoff(*DEADLINES.retries_s, failures=2).next_s() == 2.0
    assert Backoff(*DEADLINES.retries_s, failures=1000).next_s() == 10.0


def test_a_join_has_the_time_that_its_bytes_take_on_the_slowest_link():
    assert DEADLINES.join_s(0) == DEADLINES.pin_s
    of_12b = DEADLINES.join_s(4 * 12 * 10**9) - DEADLINES.pin_s
    assert of_12b == 48e9 * 8 / 0.1e9
