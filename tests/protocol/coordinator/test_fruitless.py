"""An island that never makes a step is let in no more, so that its machines end."""

import pytest
from kit import Driver, of, only

from diloco_jax.protocol.messages import Refused, Welcome


def fail(d: Driver, incarnation: int) -> None:
    """One start that fails before its first step, and says so."""
    assert only(d.hello("a", incarnation), Welcome)
    d.report("a", 0, phase="compiling")
    d.goodbye("a", "failed")


def test_failures_in_a_row_without_a_step_end_the_island() -> None:
    d = Driver(fruitless_starts=3)
    for incarnation in (1, 2, 3):
        fail(d, incarnation)
    refused = only(d.hello("a", 4), Refused)
    assert refused.code == "no_progress"
    assert "failed 3 times in a row" in refused.message
    assert "placement.fruitless_starts = 3" in refused.message
    assert only(d.hello("b"), Welcome)  # The others go on.


def test_a_crash_that_nobody_heard_counts() -> None:
    d = Driver(fruitless_starts=3)
    for incarnation in (1, 2, 3):
        assert only(d.hello("a", incarnation), Welcome)
    assert only(d.hello("a", 4), Refused).code == "no_progress"
    # The last one may return: only a further start is refused.
    assert only(d.hello("a", 3), Welcome)


def test_a_step_ends_the_row() -> None:
    d = Driver(fruitless_starts=2)
    fail(d, 1)
    d.hello("a", 2)
    d.report("a", 1)
    d.goodbye("a", "failed")
    fail(d, 3)
    assert only(d.hello("a", 4), Welcome)
    d.goodbye("a", "failed")
    assert only(d.hello("a", 5), Refused).code == "no_progress"


@pytest.mark.parametrize("reason", ["stopped", "preempted"])
def test_an_island_that_was_asked_to_end_has_not_failed(reason) -> None:
    d = Driver(fruitless_starts=2)
    for incarnation in range(1, 6):
        assert only(d.hello("a", incarnation), Welcome)
        d.goodbye("a", reason)


def test_any_number_of_failures_without_the_bound() -> None:
    d = Driver()
    for incarnation in range(1, 30):
        fail(d, incarnation)


def test_a_crash_of_the_coordinator_does_not_start_the_row_anew() -> None:
    d = Driver(fruitless_starts=3)
    fail(d, 1)
    snapshot = d.state
    logged = len(d.log)
    fail(d, 2)
    fail(d, 3)
    d.crash(snapshot, skip=logged)
    assert of(d.hello("a", 4), Refused)[0].code == "no_progress"
