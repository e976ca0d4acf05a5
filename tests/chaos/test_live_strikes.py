"""Strikes are told while a run goes on."""

import pytest
from test_measure import KILLED, merged, note, strike

from diloco_jax.chaos.strike import LiveReport
from diloco_jax.observability.tape import Tape


@pytest.fixture
def live(tmp_path):
    """A report, what it said, and the tape that it reads."""
    said = []
    tape = Tape(tmp_path / "tape.jsonl")
    yield LiveReport(tmp_path, ("a", "b"), said.append), said, tape
    tape.close()


def test_a_strike_is_told_once_and_when_its_cost_is_known(live):
    report, said, tape = live
    report.look()
    report.struck(strike(10.0, "a", "kill"))
    *before, last = KILLED
    for record in before:
        tape.append(record)
        report.look()
    assert not said
    tape.append(last)
    for _ in range(2):
        report.look()
    assert said == [
        "a after kill: noticed after 0.5 s, back after 3.0 s, merged again after "
        "6.0 s, 40 tokens lost"
    ]
    assert not report._tape, "nothing grows"
    assert not report._struck
    assert not report._told


def test_a_strike_that_another_one_follows_is_told_as_far_as_it_is_known(live):
    report, said, tape = live
    report.struck(strike(10.0, "a", "kill"))
    tape.append(note(10.5, "absent", "a"))
    report.look()
    report.struck(strike(11.0, "a", "kill"))
    report.look()
    assert said == ["a after kill: noticed after 0.5 s"]
    tape.append(note(13.0, "joined", "a", 3))
    tape.append(merged(15.0, ("a", 3)))
    report.look()
    assert said[1:] == ["a after kill: back after 2.0 s, merged again after 4.0 s"]


def test_a_strike_on_the_coordinator_ends_the_view_of_all_others(live):
    report, said, _ = live
    report.struck(strike(10.0, "a", "stop", 2.0))
    report.struck(strike(11.0, "b", "kill", missed=["b"]))
    report.look()
    assert not said
    report.struck(strike(13.0, "coordinator", "kill"))
    report.look()
    assert said == ["a after stop: struck again before anything was known"]
