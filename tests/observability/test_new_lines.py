"""Lines are read once each, while their writer goes on, through all its files."""

from __future__ import annotations

import pytest

from diloco_jax.observability.tape import JsonLines, NewLines, read_lines


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


def test_a_line_that_is_no_record_is_left_out(follow, tmp_path):
    _, reader = follow
    with (tmp_path / "tape.jsonl").open("ab") as file:
        file.write(b'nonsense\n[1]\n\xff\n{"time":2,"n":2}\n')
    assert numbers(reader) == [2]
