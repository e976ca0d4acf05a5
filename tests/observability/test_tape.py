"""The tape finds every line that is missing, altered or out of order."""

import pytest

from diloco_jax.observability.tape import (
    BLOCK_BYTES,
    LAST_LINES,
    JsonLines,
    Repeats,
    Tape,
    TapeError,
    newest_record,
    not_on_tape,
    read_tape,
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


def test_first_line_has_no_predecessor(path):
    assert b'"prev":""' in path.read_bytes().splitlines()[0]


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


def test_goes_on_with_the_chain_after_a_restart(path):
    tape = Tape(path)
    tape.append({"kind": "restarted"})
    tape.close()
    assert [r["kind"] for r in read_tape(path)] == ["tick"] * 5 + ["restarted"]


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


def test_lines_longer_than_a_block_chain_too(tmp_path):
    for n in range(3):
        tape = Tape(tmp_path / "tape.jsonl")
        tape.append({"n": n, "text": "y" * 100_000})
        tape.close()
    assert [r["n"] for r in read_tape(tmp_path / "tape.jsonl")] == [0, 1, 2]


def test_each_line_is_in_the_file_when_append_returns(tmp_path):
    tape = Tape(tmp_path / "tape.jsonl")
    tape.append({"n": 1})
    assert len(list(read_tape(tmp_path / "tape.jsonl"))) == 1
    tape.close()


def test_a_record_cannot_bring_its_own_link(path):
    tape = Tape(path)
    with pytest.raises(ValueError, match="prev"):
        tape.append({"prev": "0"})
    tape.close()


def test_plain_lines_carry_no_chain(tmp_path):
    lines = JsonLines(tmp_path / "logs" / "metrics.jsonl")
    lines.append({"loss": 2.5})
    lines.close()
    assert (tmp_path / "logs" / "metrics.jsonl").read_text() == '{"loss":2.5}\n'


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


def test_lines_are_found_from_the_last_one_back_whatever_their_length(tmp_path):
    path = tmp_path / "tape.jsonl"
    lengths = [10, 70_000, 1, 200_000, *([500] * 400), BLOCK_BYTES - 20, 3]
    lines = JsonLines(path)
    for number, length in enumerate(lengths):
        lines.append({"kind": f"{number}", "text": "y" * length})
    lines.close()
    for number, length in enumerate(lengths):
        assert len(newest_record(path, f"{number}")["text"]) == length


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
