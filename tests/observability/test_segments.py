"""A tape in many files reads as one, whoever reads it, and whenever its writer dies."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from diloco_jax.observability.tape import (
    LAST_LINES,
    Tape,
    TapeError,
    closed_segments,
    newest_record,
    not_on_tape,
    put_aside,
    read_tape,
    remove_tape,
    tells_of_the_end,
)

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
def path(tmp_path):
    write(tmp_path / "tape.jsonl", range(100))
    assert len(closed_segments(tmp_path / "tape.jsonl")) > 5
    return tmp_path / "tape.jsonl"


def test_no_file_is_larger_than_the_limit_and_a_line(path):
    line = max(len(line) for line in path.read_bytes().splitlines(keepends=True))
    sizes = [file.stat().st_size for file in closed_segments(path)]
    assert all(FULL <= size < FULL + line for size in sizes)
    assert 0 < path.stat().st_size < FULL + line


def test_reads_as_the_tape_that_one_file_would_be(path, tmp_path):
    whole = tmp_path / "one" / "tape.jsonl"
    tape = Tape(whole)
    for n in range(100):
        tape.append(numbered(n))
    tape.close()
    files = [file.read_bytes() for file in (*closed_segments(path), path)]
    assert b"".join(files) == whole.read_bytes()
    assert list(read_tape(path)) == list(read_tape(whole))


def test_is_found_from_the_end_back_through_all_files(path):
    tape = Tape(path, FULL)
    tape.append({"kind": "recovered", "time": 1.0})
    for n in range(100, 150):
        tape.append(numbered(n))
    tape.close()
    assert newest_record(path, "recovered")["time"] == 1.0
    durable = [{"kind": "tick", "n": n} for n in (20, 148, 149, 150, 151)]
    assert not_on_tape(path, durable) == durable[3:]
    # The snapshot is old: the newest record of the tape that is durable is far back.
    long_ago = [{"kind": "recovered"}, {"kind": "term"}]
    assert not_on_tape(path, long_ago) == long_ago[1:]


def test_the_end_of_a_run_is_found_in_a_closed_file(path):
    assert not tells_of_the_end(path)
    tape = Tape(path, FULL)
    tape.append({"kind": "finished"})
    for _ in range(LAST_LINES - 1):
        tape.append({"kind": "left"})
    tape.close()
    assert tells_of_the_end(path)


def test_numbers_of_lines_go_through_all_files(path):
    closed = closed_segments(path)
    before = len(closed[0].read_bytes().splitlines())
    lines = closed[1].read_bytes().splitlines(keepends=True)
    closed[1].write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(TapeError, match=f"line {before + 2}:.*missing"):
        list(read_tape(path))


@pytest.mark.parametrize("gone", [0, 2, -1])
def test_a_file_that_is_missing_is_named(path, gone):
    file = closed_segments(path)[gone]
    file.unlink()
    name = file.name if gone != -1 else "lines before .* are missing"
    with pytest.raises(TapeError, match=name):
        list(read_tape(path))


@pytest.mark.parametrize("emptied", [False, True])
def test_goes_on_where_a_writer_died_as_it_began_a_file(path, emptied):
    """Between putting the full file aside and the first line of the next one."""
    put_aside(path)
    if emptied:
        path.touch()
    assert [r["n"] for r in read_tape(path)] == list(range(100))
    assert newest_record(path, "tick")["n"] == 99
    write(path, range(100, 130))
    assert [r["n"] for r in read_tape(path)] == list(range(130))


def test_other_files_of_the_folder_are_none_of_the_tape(path):
    for name in ("tape.jsonl.bak", "tape.1.jsonl", "metrics.000001.jsonl"):
        path.with_name(name).write_text("no tape\n")
    assert len(list(read_tape(path))) == 100
    remove_tape(path)
    assert len(list(path.parent.iterdir())) == 3


def test_a_reader_beside_the_writer_never_misses_a_file(tmp_path):
    """Each reading is a tape without a gap, and ends at or after the last line that
    stood when it began."""
    path = tmp_path / "tape.jsonl"
    written, problems, readings = [0], [], [0]
    stop = threading.Event()
    write(path, [0])

    def reading():
        while not stop.is_set():
            least = written[0]
            try:
                numbers = [r["n"] for r in read_tape(path)]
                newest = newest_record(path, "tick")["n"]
            except Exception as error:
                problems.append(error)
                return
            if numbers != list(range(len(numbers))) or min(numbers[-1], newest) < least:
                problems.append((least, newest, numbers[-5:]))
                return
            readings[0] += 1

    reader = threading.Thread(target=reading)
    reader.start()
    tape = Tape(path, 120)  # Every other line begins a file.
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


WRITER = """
import sys
from diloco_jax.observability.tape import Tape
tape = Tape(sys.argv[1], 200)
n = int(sys.argv[2])
while True:
    tape.append({"kind": "tick", "n": n, "time": 0.0})
    print(n, flush=True)
    n += 1
"""


def test_nothing_is_lost_when_the_writer_is_killed(tmp_path):
    path, begin = tmp_path / "tape.jsonl", 0
    for lines in (7, 58, 131):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(begin)],
            stdout=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        ) as writer:
            told = [int(writer.stdout.readline()) for _ in range(lines)]
            writer.send_signal(signal.SIGKILL)
            told += [int(line) for line in writer.stdout if line.endswith(b"\n")]
        Tape(path, 200).close()
        numbers = [r["n"] for r in read_tape(path)]
        assert numbers == list(range(len(numbers)))
        assert numbers[-1] >= told[-1]
        begin = len(numbers)
    assert len(closed_segments(path)) > 30
    # The newest segment is empty if the writer was killed just after it began one.
    newest = path.read_bytes().splitlines()
    assert not newest or json.loads(newest[-1])["n"] == begin - 1
