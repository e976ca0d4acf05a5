"""Failures are found in the lines of a run, with their reason and their cost."""

from __future__ import annotations

import msgspec
import one_truth
import pytest
from made_runs import BEGIN, FRAGMENTS, MadeRun, Outage, write_run
from test_timeline import Told, recovered

from diloco_jax import run_files
from diloco_jax.coordinator.roster import Roster
from diloco_jax.files import write_json
from diloco_jax.observability import failures
from diloco_jax.observability.tape import JsonLines, Tape
from diloco_jax.protocol import records
from diloco_jax.workdir import read_summary

OF_A = {"island": "a", "incarnation": 1}


@pytest.fixture
def told():
    """A run whose island a trains, a step and a line a second, up to 30 s."""
    told = Told()
    told.join(0.0)
    trains(told, 1, 30)
    return told


def trains(told: Told, first: int, last: int, more: int = 0) -> None:
    for second in range(first, last + 1):
        told.metrics(float(second), second + more)


def found(told: Told) -> list[failures.NotedFailure]:
    return list(told.timeline.failures.within(BEGIN, BEGIN + 1000))[::-1]


def test_nothing_failed(told):
    told.tape(31.0, records.Stopping(tokens=1))
    told.left(32.0, "finished")
    told.tape(32.0, records.Finished())
    assert found(told) == []


def test_a_killed_island_failed_until_its_next_life_makes_steps(told):
    told.tape(30.5, records.Absent(why="disconnected", **OF_A))
    told.left(33.0, "died")
    told.join(33.1, incarnation=2)
    told.metrics(35.0, 0, "compiling")
    told.metrics(40.0, 2)
    (one,) = found(told)
    assert (one.who, one.began - BEGIN, one.ended - BEGIN) == ("a", 30.5, 38.0)
    assert one.why.startswith("its process ended without a word")
    assert one.lost_tokens == 200, "of each of two fragments: 100 and 300"
    assert one.idle_tokens == pytest.approx(7.5 * 100)


def test_one_that_nobody_missed_failed_when_it_was_last_heard(told):
    told.join(32.0, incarnation=2)
    told.left(32.1, "failed")
    (one,) = found(told)
    assert one.why == "its process ended with an error"
    assert one.ended is None
    told.metrics(35.0, 1)
    assert found(told)[0].ended == BEGIN + 34


def test_a_connection_that_broke_is_not_a_process_that_ended(told):
    told.tape(30.5, records.Absent(why="disconnected", **OF_A))
    told.tape(32.0, records.Resumed(steps=32, **OF_A))
    (one,) = found(told)
    assert one.why == "its connection broke; the same process is back"
    assert one.ended == BEGIN + 32


def test_one_that_fell_silent_failed_when_it_was_last_heard(told):
    told.tape(40.0, records.Absent(why="silent", **OF_A))
    (one,) = found(told)
    assert (one.began, one.ended) == (BEGIN + 30, None)
    told.metrics(45.0, 31)
    assert found(told)[0].ended == BEGIN + 45


def test_a_gap_that_the_tape_does_not_name_is_no_failure(told):
    trains(told, 36, 40)
    assert found(told) == []


@pytest.mark.parametrize("lacked", [False, True])
def test_a_coordinator_that_came_back_had_ended(told, lacked):
    if lacked:  # Lines of its log that the tape lacks come first, at the same time.
        told.tape(35.9, records.Absent(why="disconnected", **OF_A))
    told.tape(36.0, recovered(30.0))
    told.tape(36.5, records.Resumed(steps=36, **OF_A))
    told.merged(38.0)
    (one,) = [f for f in found(told) if f.who == "coordinator"]
    assert one.why.startswith("its process ended: killed, crashed or stopped")
    assert (one.began - BEGIN, one.ended - BEGIN) == (30.0, 36.0)
    assert one.merged == BEGIN + 38
    assert told.seconds(0, 36, "coordinator")["absent"] == pytest.approx(6)


def test_a_run_that_was_stopped_as_a_whole_did_not_fail(told):
    told.left(31.0, "stopped")
    told.tape(500.0, recovered(31.0))
    assert found(told) == []


def test_merges_without_it_and_the_first_with_it_are_counted(told):
    told.tape(30.5, records.Absent(why="disconnected", **OF_A))
    told.merged(31.0, island="b")
    told.merged(32.0, island="b", version=2)
    told.tape(32.5, records.Resumed(steps=32, **OF_A))
    told.merged(34.0, version=3)
    (one,) = found(told)
    assert (one.without, one.merged) == (2, BEGIN + 34)


def test_quarantine_is_a_failure_until_the_release(told):
    told.tape(31.0, records.Quarantined(refused=8, **OF_A))
    told.metrics(32.0, 32)
    (one,) = found(told)
    assert "8 of its deltas in a row" in one.why
    assert one.ended is None
    told.tape(35.0, records.Released(fit=4, **OF_A))
    assert found(told)[0].ended == BEGIN + 35


def test_the_list_is_bounded():
    told = Told()
    for life in range(failures.KEPT + 50):
        told.join(2.0 * life, incarnation=life + 1)
        told.left(2.0 * life + 1, "died", incarnation=life + 1)
    assert len(list(told.timeline.failures.within(0, BEGIN + 1e6))) == failures.KEPT


def test_an_outage_at_the_end_of_a_run_counts_once_in_every_life(told):
    told.tape(30.5, records.Absent(why="disconnected", **OF_A))
    told.left(33.0, "died")
    told.tape(40.5, records.Finished())
    kept = msgspec.msgpack.encode(told.timeline.failures.kept)
    later = failures.Failures(msgspec.msgpack.decode(kept, type=failures.KeptFailures))
    assert told.timeline.failures.away_seconds("a", BEGIN + 1000) == 10
    assert later.away_seconds("a", BEGIN + 1000) == 10


def test_every_page_and_table_tells_the_same_of_a_run(tmp_path):
    """The coordinator's summary is of the lines that it wrote, through a restart of its
    process; all others read what it left."""
    run = MadeRun(
        islands=3,
        seconds=200,
        outages=(
            Outage(island=1, at_s=60, seconds=9),
            Outage(island=2, at_s=90, seconds=5),
            Outage(island=2, at_s=166, seconds=5),
        ),
        coordinator_away=(140, 160),
        fragment_parameters=(1, 2) * (FRAGMENTS // 2),
        lost_by_fragment=(4096, 1152) * (FRAGMENTS // 2),
    )
    workdir = write_run(run, tmp_path / "run")
    chained(workdir)
    path = tmp_path / "killed/roster.msgpack"
    path.parent.mkdir()
    roster = Roster(path)
    files = {"tape": Tape(path.parent / "tape.jsonl")}
    files["metrics"] = JsonLines(path.parent / "metrics.jsonl")
    for which, line in run.lines():
        if line["kind"] == "recovered":  # It was killed, and had saved long before.
            roster = Roster.begin_from(path)
        getattr(roster.failures, which)(line)
        files[which].append(line)
        if line["time"] < BEGIN + 88:
            roster.save()
    for file in files.values():
        file.close()
    names = run.names
    islands = {
        name: {
            "away_seconds": roster.failures.away_seconds(name, 0.0),
            "tokens_lost": {"died": outages * (4096 + 2 * 1152) // 3},
        }
        for name, outages in zip(names, (0, 1, 2), strict=True)
    }
    told = {"failures": [one.told(BEGIN) for one in roster.failures]}
    summary = {**read_summary(workdir), **told, "islands": islands}
    write_json(summary, workdir / run_files.SUMMARY)
    lengths = one_truth.check(workdir)
    assert lengths["coordinator"] == [20.0]
    # From the connection's end to the first step: starting and compiling are in it.
    for name, seconds in ((names[1], [9]), (names[2], [5, 5])):
        assert lengths[name] == pytest.approx([s + 20 for s in seconds], abs=0.3)


def chained(workdir) -> None:
    """Chain the lines of a made tape by their hashes."""
    lines = (workdir / run_files.TAPE).read_bytes().splitlines()
    (workdir / run_files.TAPE).unlink()
    tape = Tape(workdir / run_files.TAPE)
    for line in lines:
        tape.append(msgspec.json.decode(line))
    tape.close()
