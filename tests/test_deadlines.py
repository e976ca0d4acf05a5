"""Pauses between attempts."""

from diloco_jax.deadlines import Backoff, Deadlines

DEADLINES = Deadlines(100.0)


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(DEADLINES)
    assert [backoff.next_s() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_earlier_failures_count():
    assert Backoff(DEADLINES, failures=2).next_s() == 4.0
    assert Backoff(DEADLINES, failures=1000).next_s() == 10.0
