"""Commands whose standard streams are closed, or whose reader goes away."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from diloco_jax import cli, streams

OPENED = """
import os, subprocess, sys
from diloco_jax.streams import hold_streams
hold_streams(unread=True)
print("said"), print("logged", file=sys.stderr), sys.stdout.flush()
assert sys.stdin.read() == ""
files = [os.open(os.devnull, os.O_RDONLY), *map(os.dup, range(3))]
assert min(files) > 2, files
child = "import os; [os.fstat(number) for number in range(3)]"
sys.exit(subprocess.run([sys.executable, "-c", child], close_fds=False).returncode)
"""
SAYS = """
import sys
from diloco_jax import cli
def command(arguments):
    print("the result", flush=True)
    return 0
name = sys.argv[1]
cli.COMMANDS[name] = (command, "", "")
cli.script()
"""


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_opened_on_nothing(tmp_path: Path, closed: str) -> None:
    (tmp_path / "opened.py").write_text(OPENED)
    command = f'exec "{sys.executable}" "{tmp_path}/opened.py" {closed}'
    done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0


@pytest.fixture
def unread() -> Iterator[Callable[[str], TextIO]]:
    """Make a stream that nobody reads: a pipe without a reader, or a full disk."""
    with contextlib.ExitStack() as opened:

        def make(kind: str) -> TextIO:
            if kind == "pipe":
                reader, writer = os.pipe()
                os.close(reader)
            else:
                writer = os.open("/dev/full", os.O_WRONLY)
            file = opened.enter_context(os.fdopen(writer, "w"))
            # What is left in its buffer is written at its end.
            null = os.open(os.devnull, os.O_WRONLY)
            opened.callback(os.close, null)
            opened.callback(os.dup2, null, writer)
            return file

        yield make


@pytest.mark.parametrize(
    ("kind", "unheard", "raises"),
    [
        ("pipe", OSError, False),
        ("full disk", OSError, False),
        ("pipe", BrokenPipeError, False),
        ("full disk", BrokenPipeError, True),
    ],
)
def test_only_a_result_that_finds_no_room_is_an_error(unread, kind, unheard, raises):
    file = unread(kind)
    stream = streams._lasting(file, unheard)
    expected = (
        pytest.raises(OSError, match="space") if raises else contextlib.nullcontext()
    )
    for _ in range(3):
        with expected:
            print("x" * 10_000, file=stream, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    stream.close()


@pytest.mark.parametrize("unbuffered", [True, False])
def test_a_line_is_written_at_once(unbuffered: bool) -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "w", encoding="latin-1") as file, os.fdopen(reads, "rb"):
        file.reconfigure(line_buffering=not unbuffered, write_through=unbuffered)
        with streams._lasting(file, OSError) as stream:
            print("grün", file=stream)
            assert os.read(reads, 100) == "grün\n".encode("latin-1")


@pytest.mark.parametrize(
    ("name", "code"), [("run", 0), ("island", 0), ("coordinator", 0), ("status", 1)]
)
def test_a_run_ends_with_its_own_code_though_nobody_reads(name, code) -> None:
    assert (name in cli.LASTING) == (code == 0)
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-c", SAYS, name]
    done = subprocess.run(command, stdout=writes, stderr=writes, timeout=60)
    os.close(writes)
    assert done.returncode == code
