"""The tape finds every line that is missing, altered or out of order. In many files it
reads as one, whoever reads it, and whenever its writer dies or goes on."""

from __future__ import annotations

import itertools
import os
import threading

import pytest

from diloco_jax.observability.tape import (
    LAST_LINES,
    JsonLines,
    NewLines,
    Repeats,
    Tape,
    TapeError,
    closed_segments,
    lines_after,
    newest_record,
    not_on_tape,
    put_aside,
    read_lines,
    read_tape,
    remove_tape,
    tells_of_the_end,
)


@pytest.fixture
def path(tmp_path):
    tape = Tape(tmp_path / "tape.jsonl")
    for n in range(5):
        tape.append({"kind": "tick", "n": n})
    tape.close()
    return tmp_path / "tape.jsonl"


def rewrite(path, change):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))


def test_reads_back_what_was_written_without_the_chain(path):
    assert list(read_tape(path)) == [{"kind": "tick", "n": n} for n in range(5)]


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        (lambda lines: lines[:2] + lines[3:], "line 3:.*missing"),
        (lambda lines: lines[1:], "line 1:.*missing"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2:.*order"),
        (
            lambda lines: [*lines[:3], lines[3].replace(b"3", b"7", 1), lines[4]],
            "line 5:.*line 4 was altered",
        ),
        (lambda lines: [*lines[:2], b"not json\n", *lines[3:]], "line 3: not a record"),
        (lambda lines: [*lines[:2], b"[1]\n", *lines[3:]], "line 3: not a record"),
        (lambda lines: [*lines[:2], b"[" * 100_000 + b"\n"], "line 3: .*Recursion"),
        (lambda lines: [*lines[:2], b"\xff" * 100_000 + b"\n"], "line 3: .*Unicode"),
        (
            lambda lines: [*lines[:2], b'{"prev":"' + b"0" * 100_000 + b'"}\n'],
            "line 3: it follows a line with hash 0000",
        ),
    ],
)
def test_the_first_bad_line_is_named_and_what_precedes_it_is_given(path, change, bad):
    rewrite(path, change)
    with pytest.raises(TapeError, match=bad) as caught:
        list(read_tape(path))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("size", [1, 200_000])
def test_an_unfinished_last_line_is_left_out_then_cut_off_and_told(path, caplog, size):
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * size)
    assert len(list(read_tape(path))) == 5
    tape = Tape(path)
    assert tape.cut_bytes == size
    assert str(size) in caplog.text
    assert path.stat().st_size == whole
    tape.append({"kind": "restarted"})
    tape.close()
    assert len(list(read_tape(path))) == 6


def test_a_record_cannot_bring_its_own_link(path):
    tape = Tape(path)
    with pytest.raises(ValueError, match="prev"):
        tape.append({"prev": "0"})
    tape.close()


MERGED = [{"kind": "merged", "version": [1, n]} for n in range(4)]


@pytest.mark.parametrize("written", range(4))
def test_what_a_crash_kept_from_the_tape_is_found(tmp_path, written):
    tape = Tape(tmp_path / "tape.jsonl")
    for record in [{"kind": "begun"}, *MERGED[:written], {"kind": "tick"}]:
        tape.append({**record, "time": 1.0})
    tape.close()
    # A snapshot held the first one, so the log begins with the second.
    assert not_on_tape(tape.path, MERGED[1:]) == MERGED[max(1, written) :]
    assert not_on_tape(tmp_path / "no file is read", []) == []


def test_the_newest_record_of_a_kind_is_found_while_a_line_is_being_written(tmp_path):
    path = tmp_path / "tape.jsonl"
    tape = Tape(path)
    for kind, n in (("a", 1), ("b", 2), ("a", 3), ("b", 4)):
        tape.append({"kind": kind, "n": n})
    tape.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"a","n":')
    assert newest_record(path, "a")["n"] == 3
    with pytest.raises(ValueError, match="no record 'c'"):
        newest_record(path, "c")


def test_a_line_that_cannot_be_read_ends_what_is_read_backwards(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"time": %d}\n' % time for time in range(4)]
    path.write_bytes(lines[0] + lines[1] + b"\0\0\0\n" + lines[2] + lines[3])
    assert lines_after(path, 0) == [{"time": 2}, {"time": 3}]
    assert lines_after(path, 2) == [{"time": 3}]
    assert lines_after(tmp_path / "none.jsonl", 0) == []


def test_the_end_of_a_run_is_on_its_tape_before_islands_leave(path):
    assert not tells_of_the_end(path)
    assert not tells_of_the_end(path.with_name("none"))
    tape = Tape(path)
    tape.append({"kind": "finished"})
    for _ in range(LAST_LINES - 1):
        tape.append({"kind": "left"})
    tape.close()
    assert tells_of_the_end(path)


def test_a_run_that_is_extended_is_not_over_before_its_second_end(path):
    tape = Tape(path)
    for kind, over in (("finished", True), ("extended", False), ("finished", True)):
        tape.append({"kind": kind})
        assert tells_of_the_end(path) == over
    tape.close()


def test_records_that_an_island_repeats_are_told_from_new_ones():
    def line(number, incarnation=1):
        who = {"island": "a", "incarnation": incarnation}
        return {"kind": "island", **who, "record": {"seq": number}}

    repeats = Repeats()
    lines = [line(1), line(2), line(2), line(1, 2), line(1), line(3)]
    found = [repeats.seen(each) for each in lines]
    assert found == [False, False, True, False, True, False]


FULL = 500
"""Bytes of a file: some ten lines."""
DEADLINE_S = 60.0


def numbered(n):
    return {"kind": "tick", "n": n, "time": 0.0}


def write(path, numbers):
    tape = Tape(path, FULL)
    for n in numbers:
        tape.append(numbered(n))
    tape.close()


@pytest.fixture
def segmented(tmp_path):
    write(tmp_path / "tape.jsonl", range(100))
    assert len(closed_segments(tmp_path / "tape.jsonl")) > 5
    return tmp_path / "tape.jsonl"


def test_no_file_is_larger_than_the_limit_and_a_line(segmented):
    line = max(len(line) for line in segmented.read_bytes().splitlines(keepends=True))
    sizes = [file.stat().st_size for file in closed_segments(segmented)]
    assert all(FULL <= size < FULL + line for size in sizes)
    assert 0 < segmented.stat().st_size < FULL + line


def test_is_found_from_the_end_back_through_all_files(segmented):
    tape = Tape(segmented, FULL)
    tape.append({"kind": "recovered", "time": 1.0})
    for n in range(100, 150):
        tape.append(numbered(n))
    tape.close()
    assert newest_record(segmented, "recovered")["time"] == 1.0
    durable = [{"kind": "tick", "n": n} for n in (20, 148, 149, 150, 151)]
    assert not_on_tape(segmented, durable) == durable[3:]
    # The snapshot is old: the newest record of the tape that is durable is far back.
    long_ago = [{"kind": "recovered"}, {"kind": "term"}]
    assert not_on_tape(segmented, long_ago) == long_ago[1:]


def test_numbers_of_lines_go_through_all_files(segmented):
    closed = closed_segments(segmented)
    before = len(closed[0].read_bytes().splitlines())
    lines = closed[1].read_bytes().splitlines(keepends=True)
    closed[1].write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(TapeError, match=f"line {before + 2}:.*missing"):
        list(read_tape(segmented))


@pytest.mark.parametrize("gone", [0, 2, -1])
def test_a_file_that_is_missing_is_named(segmented, gone):
    file = closed_segments(segmented)[gone]
    file.unlink()
    name = file.name if gone != -1 else "lines before .* are missing"
    with pytest.raises(TapeError, match=name):
        list(read_tape(segmented))


@pytest.mark.parametrize("emptied", [False, True])
def test_goes_on_where_a_writer_died_as_it_began_a_file(segmented, emptied):
    """Between putting the full file aside and the first line of the next one."""
    put_aside(segmented)
    if emptied:
        segmented.touch()
    assert [r["n"] for r in read_tape(segmented)] == list(range(100))
    assert newest_record(segmented, "tick")["n"] == 99
    write(segmented, range(100, 130))
    assert [r["n"] for r in read_tape(segmented)] == list(range(130))


def test_other_files_of_the_folder_are_none_of_the_tape(segmented):
    for name in ("tape.jsonl.bak", "tape.1.jsonl", "metrics.000001.jsonl"):
        segmented.with_name(name).write_text("no tape\n")
    assert len(list(read_tape(segmented))) == 100
    remove_tape(segmented)
    assert len(list(segmented.parent.iterdir())) == 3


def test_a_reader_beside_the_writer_never_misses_a_file(tmp_path):
    """Each reading is a tape without a gap, and ends at or after the last line that
    stood when it began."""
    segmented = tmp_path / "tape.jsonl"
    written, problems, readings = [0], [], [0]
    stop = threading.Event()
    write(segmented, [0])

    def reading():
        while not stop.is_set():
            least = written[0]
            try:
                numbers = [r["n"] for r in read_tape(segmented)]
                newest = newest_record(segmented, "tick")["n"]
            except Exception as error:
                problems.append(error)
                return
            if numbers != list(range(len(numbers))) or min(numbers[-1], newest) < least:
                problems.append((least, newest, numbers[-5:]))
                return
            readings[0] += 1

    reader = threading.Thread(target=reading)
    reader.start()
    tape = Tape(segmented, 120)  # Every other line begins a file.
    for n in itertools.count(1):
        tape.append(numbered(n))
        written[0] = n
        if problems or (n >= 300 and readings[0] >= 10) or n > 20_000:
            break
    stop.set()
    reader.join(DEADLINE_S)
    tape.close()
    assert not problems
    assert readings[0]


@pytest.fixture
def follow(tmp_path):
    """A writer of small files, and what reads them."""
    writer = JsonLines(tmp_path / "tape.jsonl", 200)
    yield writer, NewLines(tmp_path / "tape.jsonl")
    writer.close()


def numbers(reader: NewLines) -> list[int]:
    return [line["n"] for line in reader]


def line(n: int) -> dict[str, float]:
    return {"time": float(n), "n": n}


def test_nothing_is_there_yet(tmp_path):
    assert list(NewLines(tmp_path / "none" / "tape.jsonl")) == []
    assert list(NewLines(tmp_path / "tape.jsonl")) == []


def test_every_line_comes_once_through_all_files(follow, tmp_path):
    writer, reader = follow
    seen = []
    for n in range(100):
        writer.append(line(n))
        if n % 7 == 0:
            seen += numbers(reader)
    assert seen + numbers(reader) == list(range(100))
    assert numbers(reader) == []
    whole = [line["n"] for line in read_lines(tmp_path / "tape.jsonl")]
    assert whole == list(range(100))


def test_a_line_without_its_end_comes_when_it_has_one(follow, tmp_path):
    writer, reader = follow
    writer.append(line(0))
    with (tmp_path / "tape.jsonl").open("ab", buffering=0) as file:
        file.write(b'{"time":1,"n"')
        assert numbers(reader) == [0]
        file.write(b":1}\n")
    assert numbers(reader) == [1]


def test_a_torn_line_that_its_writer_cut_off_is_forgotten(follow, tmp_path):
    writer, reader = follow
    writer.append(line(0))
    with (tmp_path / "tape.jsonl").open("ab", buffering=0) as file:
        file.write(b'{"time":1,"n":11')
    assert numbers(reader) == [0]
    again = JsonLines(tmp_path / "tape.jsonl")
    assert again.cut_bytes
    again.append(line(2))
    again.close()
    assert numbers(reader) == [2]


def test_a_tape_that_begins_anew_is_read_from_its_start(follow, tmp_path):
    """As that of a run whose first start failed."""
    writer, reader = follow
    writer.append(line(0))
    assert numbers(reader) == [0]
    os.replace(tmp_path / "tape.jsonl", tmp_path / "holds its number")
    again = JsonLines(tmp_path / "tape.jsonl")
    again.append(line(1))
    again.close()
    assert numbers(reader) + numbers(reader) == [1]


def test_a_line_that_is_no_record_is_left_out(follow, tmp_path):
    _, reader = follow
    with (tmp_path / "tape.jsonl").open("ab") as file:
        file.write(b'nonsense\n[1]\n\xff\n{"time":2,"n":2}\n')
    assert numbers(reader) == [2]
