"""Facts that a tape gives of the strikes on its run, told while it goes on."""

import pytest

from diloco_jax.chaos import measure
from diloco_jax.chaos.strike import LiveReport
from diloco_jax.observability.tape import JsonLines, Tape


def strike(time, who, kind, seconds=0.0, missed=()):
    return {
        "time": time,
        "who": [who],
        "kind": kind,
        "seconds": seconds,
        "missed": list(missed),
    }


def note(time, kind, island="", incarnation=1, **more):
    return {
        "time": time,
        "kind": kind,
        "island": island,
        "incarnation": incarnation,
        **more,
    }


def merged(time, *parts):
    contributions = [{"island": n, "incarnation": i} for n, i in parts]
    return {"time": time, "kind": "merged", "contributions": contributions}


KILLED = [
    note(0.0, "begun", fragment_parameters=[1, 10]),
    merged(9.0, ("a", 1), ("b", 1)),
    note(10.5, "absent", "a"),
    merged(10.7, ("a", 1), ("b", 1)),  # A delta that the old life had left behind.
    note(13.0, "left", "a", reason="died", lost_tokens_by_fragment=[7, 40]),
    note(13.0, "joined", "a", 2),
    merged(14.0, ("a", 1), ("b", 1)),
    merged(15.0, ("b", 1)),
    merged(16.0, ("a", 2)),
]


KILL, DEAD = strike(10.0, "a", "kill"), strike(20.0, "coordinator", "kill")
LEFT_AT_THE_END = note(
    50.0, "left", "a", reason="finished", lost_tokens_by_fragment=[9]
)


@pytest.mark.parametrize(
    ("strikes", "tape", "detected_s", "back_s", "merged_s", "lost"),
    [
        pytest.param([KILL], KILLED, 0.5, 3.0, 6.0, 37, id="killed"),
        pytest.param(
            *([KILL], [r for r in KILLED if r["kind"] != "joined"]),
            *(0.5, None, None, 37),
            id="killed, and not back",
        ),
        pytest.param(
            [strike(10.0, "a", "stop", 3.0)],
            [merged(11.0, ("a", 1)), merged(14.0, ("b", 1)), merged(15.0, ("a", 1))],
            *(None, None, 5.0, 0),
            id="a short stop that nobody notices",
        ),
        pytest.param(
            [strike(10.0, "a", "delay", 3.0)],
            [merged(14.0, ("a", 1)), LEFT_AT_THE_END],
            *(None, None, 4.0, 0),
            id="the end of the run is no detection",
        ),
        pytest.param(
            [strike(10.0, "a", "stop", 3.0), DEAD],
            [note(21.0, "absent", "a"), note(22, "resumed", "a"), merged(23, ("a", 1))],
            *(None, None, None, 0),
            id="a return after the coordinator's crash",
        ),
        pytest.param(
            [strike(10.0, "a", "partition", 10.0)],
            [
                *(note(15.0, "absent", "a"), merged(16.0, ("b", 1))),
                *(note(21.0, "resumed", "a"), merged(22.0, ("a", 1))),
            ],
            *(5.0, 11.0, 12.0, 0),
            id="a long partition that is noticed",
        ),
        pytest.param(
            [strike(10.0, "a", "partition", 6.0)],
            [
                note(14.0, "absent", "a"),
                merged(15.0, ("a", 1)),  # A delta that had arrived before.
                *(merged(17.0, ("b", 1)), merged(18.0, ("a", 1)), LEFT_AT_THE_END),
            ],
            *(4.0, None, 8.0, 0),
            id="heard again on its connection",
        ),
        pytest.param(
            [strike(8.0, "a", "delay", 1.0), KILL],
            KILLED,
            *(None, None, None, 0),
            id="a later strike there ends the view",
        ),
        pytest.param(
            [strike(10.0, "coordinator", "kill")],
            [merged(9.0, ("a", 1)), note(14.0, "recovered"), merged(15.5, ("a", 1))],
            *(None, 4.0, 5.5, 0),
            id="a killed coordinator",
        ),
    ],
)
def test_what_a_strike_cost(strikes, tape, detected_s, back_s, merged_s, lost):
    found = measure.measured(strikes, tape, ["a", "b"])[0]
    times = (found.detected_s, found.back_s, found.merged_s)
    assert (*times, found.tokens_lost) == (detected_s, back_s, merged_s, lost)


def test_strikes_on_links_of_the_coordinator_and_those_that_missed():
    strikes = [
        strike(1.0, "coordinator", "partition", 2.0),
        strike(2.0, "a", "kill", missed=["a"]),
    ]
    found = measure.measured(strikes, [], ["a", "b"])
    assert [(o.who, o.kind) for o in found] == [("a", "partition"), ("b", "partition")]


def test_strikes_on_the_process_or_disk_of_the_coordinator_are_its_own():
    strikes = [
        strike(1.0, "coordinator", "slow", 2.0),
        strike(5.0, "coordinator", "full", 2.0),
    ]
    found = measure.measured(strikes, [merged(8.0, ("a", 1))], ["a", "b"])
    assert [(o.who, o.kind, o.merged_s) for o in found] == [
        ("coordinator", "slow", None),
        ("coordinator", "full", 3.0),
    ]


def test_a_worker_that_is_killed_ends_the_coordinator():
    tape = [
        {"time": 14.0, "kind": "recovered"},
        {**merged(16.0, ("a", 1)), "fragment": 3},
    ]
    (found,) = measure.measured([strike(10.0, "worker-1", "kill")], tape, ["a"])
    assert found.who == "worker-1"
    assert (found.detected_s, found.back_s, found.merged_s) == (None, 4.0, 6.0)


def test_rows_say_what_is_missing():
    strikes = [strike(10.0, "a", "kill"), strike(20.0, "a", "kill")]
    _, row = measure.rows(measure.measured(strikes, KILLED, ["a"]))
    assert row[:3] == ("kill", "a", "2")
    assert row[4:] == ("3.0 (worst 3.0, 1 not)", "6.0 (worst 6.0, 1 not)", "37")


def test_files_of_a_run_and_its_plot(tmp_path):
    assert measure.outcomes(tmp_path, ["a"]) == []
    lines = JsonLines(tmp_path / "chaos.jsonl")
    lines.append(strike(10.0, "a", "kill"))
    lines.close()
    tape = Tape(tmp_path / "tape.jsonl")
    for record in KILLED:
        tape.append(record)
    tape.close()
    found = measure.outcomes(tmp_path, ["a", "b"])
    assert [o.merged_s for o in found] == [6.0]
    drawn = Tape(tmp_path / "drawn/tape.jsonl")
    drawn.append(note(9.0, "begun"))
    drawn.append(note(9.5, "joined", "a", tokens_per_step=4))
    drawn.close()
    measure.write_plot(found, drawn.path.parent, tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_gaps_are_in_median_steps():
    island = {"max_step_gap_seconds": 3.0, "median_step_seconds": 2.0}
    never = {"max_step_gap_seconds": 0.0, "median_step_seconds": 0.0}
    summary = {"islands": {"a": island, "b": never}}
    assert measure.longest_gaps(summary) == {"a": 1.5}


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
        "6.0 s, 37 tokens lost"
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
