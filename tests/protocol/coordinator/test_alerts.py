"""People are told of islands that stay away, that are back, and that none is left."""

import pytest
from kit import joined, make_config, of

from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.state import (
    Alert,
)

LEASE_S = make_config().lease_s


def told(effects):
    return [alert.text for alert in of(effects, Alert)]


def keep_alive(driver, seconds, *names):
    """Time passes, and these islands report meanwhile; what people were told."""
    found = []
    while seconds > 0:
        step = min(seconds, LEASE_S / 4)
        seconds -= step
        found += told(driver.wait(step))
        for name in names:
            found += told(driver.report(name))
    return found


@pytest.fixture
def driver():
    driver = joined("a", "b", "c", reunion_s=5.0)
    return driver


def test_an_island_that_blinks_is_not_told_of(driver):
    driver.disconnect("b")
    assert keep_alive(driver, 0.9 * LEASE_S, "a", "c") == []
    assert told(driver.hello("b")) == []
    assert keep_alive(driver, 3 * LEASE_S, "a", "b", "c") == []


def test_an_absence_that_lasts_is_told_once_and_so_is_the_return(driver):
    driver.disconnect("b")
    (text,) = keep_alive(driver, LEASE_S, "a", "c")
    assert "island 'b' is absent" in text
    assert "2 of 3 islands are left" in text
    assert keep_alive(driver, 5 * LEASE_S, "a", "c") == []
    (text,) = told(driver.hello("b", incarnation=2))
    assert "island 'b' is back" in text
    assert "3 of 3 islands are left" in text
    driver.disconnect("b")
    (text,) = keep_alive(driver, LEASE_S, "a", "c")
    assert "island 'b' is absent" in text, "another absence"


def test_silence_counts_from_the_end_of_the_lease(driver):
    assert keep_alive(driver, 1.75 * LEASE_S, "a", "c") == []
    (text,) = keep_alive(driver, LEASE_S / 2, "a", "c")
    assert "island 'b' is absent" in text


def test_islands_that_are_cut_off_together_are_one_alert(driver):
    driver.join(*(f"d{n}" for n in range(20)))
    gone = [name for name in driver.state.islands if name != "a"]
    for name in gone:
        driver.wait(0.1)
        driver.disconnect(name)
    (text,) = keep_alive(driver, LEASE_S, "a")
    assert "islands 'b', 'c', 'd0'" in text
    assert " and 14 more are absent" in text
    assert "1 of 23 islands are left" in text
    found = []
    for name in gone:
        driver.now += 0.1
        found += told(driver.hello(name))
    assert len(found) == 1
    assert " and 14 more are back; 23 of 23" in found[0]


def test_who_returns_alone_is_told_of_once_the_others_could_be_back(driver):
    driver.play("b.away c.away")
    keep_alive(driver, LEASE_S, "a")
    for _ in range(2):
        assert told(driver.hello("b")) == [], "c may follow within 5 s"
        due = decide.next_deadline(driver.state, driver.now)
        assert due == driver.now + 5.0
        assert told(driver.wait(due - driver.now - 1.0)) == []
        (text,) = told(driver.wait(1.0))
        assert "island 'b' is back; 2 of 3 islands are left" in text
        driver.disconnect("b")
        (text,) = keep_alive(driver, LEASE_S, "a")
        assert "island 'b' is absent" in text


def test_islands_that_are_cut_off_one_after_the_other_are_one_alert():
    """The first deadline is the first island's, and the alert waits for the others."""
    driver = joined("a", "b", "c", "d", reunion_s=5.0)
    for name, pause in (("b", 2.0), ("c", 4.0), ("d", 0.0)):
        driver.disconnect(name)
        driver.wait(pause)
    lost = driver.state.absences.due
    driver.report("a")
    (text,) = told(driver.wait(lost["b"] - driver.now))
    assert "islands 'b', 'c' are absent" in text
    driver.report("a")
    (text,) = told(driver.wait(lost["d"] - driver.now))
    assert "island 'd' is absent" in text


def test_no_island_left_is_told_apart_even_if_they_said_goodbye(driver):
    driver.goodbye("a", "preempted")
    driver.play("+10 b.away c.away")
    (text,) = told(driver.wait(LEASE_S))
    assert "no island is left" in text
    assert "'a', 'b', 'c'" in text
    assert told(driver.wait(50 * LEASE_S)) == []
    (text,) = told(driver.hello("a", incarnation=2))
    assert "island 'a' is back: for 5100 s no island was left; 1 of 3" in text
    assert keep_alive(driver, 0.9 * LEASE_S, "a") == [], "they may follow"
    (text,) = keep_alive(driver, 0.1 * LEASE_S, "a")
    assert "islands 'b', 'c' are absent" in text, "they stay away"


def test_time_alone_tells(driver):
    """A driver that goes by the protocol's deadlines hears in time."""
    for name in "abc":
        driver.disconnect(name)
    began, found = driver.now, []
    while (at := decide.next_deadline(driver.state, driver.now)) is not None:
        found += told(driver.wait(at - driver.now))
    assert driver.now - began == LEASE_S
    assert len(found) == 1


def test_nobody_is_missed_once_the_run_ends():
    driver = joined("a", "b", total_tokens=100)
    driver.play("b.away a=10")
    assert driver.state.phase != "running"
    assert keep_alive(driver, 2 * LEASE_S) == []
