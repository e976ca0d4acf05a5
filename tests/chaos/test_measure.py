"""Facts that a tape gives of the strikes on its run."""

from diloco_jax.chaos import measure
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
    merged(9.0, ("a", 1), ("b", 1)),
    note(10.5, "absent", "a"),
    merged(10.7, ("a", 1), ("b", 1)),  # A delta that the old life had left behind.
    note(13.0, "left", "a", lost_tokens_by_fragment=[7, 40]),
    note(13.0, "joined", "a", 2),
    merged(14.0, ("a", 1), ("b", 1)),
    merged(15.0, ("b", 1)),
    merged(16.0, ("a", 2)),
]


def test_a_killed_island():
    (found,) = measure.measured([strike(10.0, "a", "kill")], KILLED, ["a", "b"])
    assert (found.detected_s, found.back_s, found.merged_s) == (0.5, 3.0, 6.0)
    assert found.tokens_lost == 40


def test_an_island_that_does_not_come_back_is_not_merged():
    tape = [r for r in KILLED if r["kind"] != "joined"]
    (found,) = measure.measured([strike(10.0, "a", "kill")], tape, ["a", "b"])
    assert (found.detected_s, found.back_s, found.merged_s) == (0.5, None, None)


def test_a_short_stop_that_nobody_notices():
    tape = [merged(11.0, ("a", 1)), merged(14.0, ("b", 1)), merged(15.0, ("a", 1))]
    (found,) = measure.measured([strike(10.0, "a", "stop", 3.0)], tape, ["a", "b"])
    assert (found.detected_s, found.back_s, found.merged_s) == (None, None, 5.0)


def test_the_end_of_the_run_is_no_detection():
    tape = [
        merged(14.0, ("a", 1)),
        note(50.0, "left", "a", lost_tokens_by_fragment=[9]),
    ]
    (found,) = measure.measured([strike(10.0, "a", "delay", 3.0)], tape, ["a"])
    assert (found.detected_s, found.back_s, found.merged_s) == (None, None, 4.0)
    assert found.tokens_lost == 0


def test_a_return_after_the_coordinators_crash_is_not_that_of_a_stop():
    tape = [note(21.0, "absent", "a"), note(22, "resumed", "a"), merged(23, ("a", 1))]
    strikes = [strike(10.0, "a", "stop", 3.0), strike(20.0, "coordinator", "kill")]
    found = measure.measured(strikes, tape, ["a"])[0]
    assert (found.detected_s, found.back_s, found.merged_s) == (None, None, None)


def test_a_long_partition_that_is_noticed():
    tape = [
        note(15.0, "absent", "a"),
        merged(16.0, ("b", 1)),
        note(21.0, "resumed", "a"),
        merged(22.0, ("a", 1)),
    ]
    strikes = [strike(10.0, "a", "partition", 10.0)]
    (found,) = measure.measured(strikes, tape, ["a", "b"])
    assert (found.detected_s, found.back_s, found.merged_s) == (5.0, 11.0, 12.0)
    assert found.tokens_lost == 0


def test_an_island_that_is_heard_again_on_its_connection_is_merged_again():
    tape = [
        note(14.0, "absent", "a"),
        merged(15.0, ("a", 1)),  # A delta that had arrived before.
        merged(17.0, ("b", 1)),
        merged(18.0, ("a", 1)),
        note(50.0, "left", "a", lost_tokens_by_fragment=[9]),
    ]
    strikes = [strike(10.0, "a", "partition", 6.0)]
    (found,) = measure.measured(strikes, tape, ["a", "b"])
    assert (found.detected_s, found.back_s, found.merged_s) == (4.0, None, 8.0)
    assert found.tokens_lost == 0, "that of the end"


def test_a_later_strike_there_ends_the_view():
    strikes = [strike(8.0, "a", "delay", 1.0), strike(10.0, "a", "kill")]
    first, second = measure.measured(strikes, KILLED, ["a", "b"])
    assert (first.detected_s, first.merged_s) == (None, None)
    assert second.detected_s == 0.5


def test_a_killed_coordinator():
    tape = [merged(9.0, ("a", 1)), note(14.0, "recovered"), merged(15.5, ("a", 1))]
    strikes = [strike(10.0, "coordinator", "kill")]
    (found,) = measure.measured(strikes, tape, ["a"])
    assert (found.detected_s, found.back_s, found.merged_s) == (None, 4.0, 5.5)


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
    assert row[4:] == ("3.0 (worst 3.0, 1 not)", "6.0 (worst 6.0, 1 not)", "40")


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
    measure.write_plot(found, KILLED, tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_gaps_are_in_median_steps():
    island = {"max_step_gap_seconds": 3.0, "median_step_seconds": 2.0}
    never = {"max_step_gap_seconds": 0.0, "median_step_seconds": 0.0}
    summary = {"islands": {"a": island, "b": never}}
    assert measure.longest_gaps(summary) == {"a": 1.5}
