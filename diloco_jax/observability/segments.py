"""JSON lines in several files: one that is written, and older closed ones.

`tape.jsonl` is the newest file of the tape. When it is full, it is renamed to
`tape.000001.jsonl`, `tape.000002.jsonl` and so on, and a new one begins; a closed file
never changes. The whole tape is `cat tape.*.jsonl tape.jsonl`. The same holds for
`metrics.jsonl`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SEGMENT_BYTES = 64 << 20
"""Bytes after which a file is full: about half an hour of 64 islands at 1 s a step."""


def files(path: Path, *, newest_first: bool = False) -> Iterator[BinaryIO]:
    """Yield the files, opened for reading, from the oldest or the newest on.

    A writer may be at work: what it puts aside meanwhile is neither left out nor read
    twice, and what it begins after the call is not read. FileNotFoundError if there is
    no file.
    """
    with _open_newest(path) as newest:
        itself = os.fstat(newest.fileno())
        older = list(
            itertools.takewhile(
                # It may have been put aside since it was opened.
                lambda file: not os.path.samestat(file.stat(), itself),
                closed(path),
            )
        )
        if newest_first:
            yield newest
            older.reverse()
        for one in older:
            with one.open("rb") as file:
                yield file
        if not newest_first:
            yield newest


def closed(path: Path) -> list[Path]:
    """Return the closed files of these lines, the oldest first."""
    name = re.compile(rf"{re.escape(path.stem)}\.\d{{6}}{re.escape(path.suffix)}")
    return sorted(file for file in path.parent.iterdir() if name.fullmatch(file.name))


def nbytes(path: Path) -> int:
    """Return the bytes of all files of these lines."""
    found = 0
    for file in (*closed(path), path):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size
    return found


def missing(path: Path) -> str:
    """Return the name of a closed file that is missing although a later one exists; ""
    if none is.
    """
    expected = (_closed_path(path, number) for number in itertools.count(1))
    for file, wanted in zip(closed(path), expected, strict=False):
        if file != wanted:
            return wanted.name
    return ""


def put_aside(path: Path) -> None:
    """Close the current file: rename it to the next number."""
    before = closed(path)
    number = _number(before[-1]) if before else 0
    path.rename(_closed_path(path, number + 1))


def _open_newest(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        # A writer that has just put it aside, or died then.
        before = closed(path) if path.parent.is_dir() else []
        if not before:
            raise
        return before[-1].open("rb")


def _closed_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number:06d}{path.suffix}")


def _number(file: Path) -> int:
    return int(file.stem.rpartition(".")[2])
