"""A process: its streams, closed or without a reader; its start without the garbage
collector; its own exit code with threads in C++."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from diloco_jax import cli, process
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.process import gc_pause

OPENED = """
import os, subprocess, sys
from diloco_jax.process import hold_streams
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
    stream = process._lasting(file, unheard)
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
        with process._lasting(file, OSError) as stream:
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


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def collections():
    """Generations that were collected since, in order."""
    seen: list[int] = []

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def make(count):
    """Make so many objects that stay; return them."""
    return [[number] for number in range(count)]


def test_nothing_is_collected_inside_and_all_is_as_before(collections):
    with gc_pause():
        before = len(collections)
        kept = make(100_000)
        assert len(collections) == before
    assert gc.isenabled()
    kept += make(100_000)
    assert len(collections) > before


def test_a_start_that_fails_leaves_the_collector_on():
    with pytest.raises(ValueError, match="fell"), gc_pause():
        raise ValueError("fell")
    assert gc.isenabled()


BUSY = textwrap.dedent(
    """
    import atexit, sys, threading
    import jax, numpy
    from diloco_jax import cli

    def in_jax(begun):
        step, values = jax.jit(lambda x: x * 2), numpy.ones(1000)
        while True:
            values = numpy.asarray(step(values))
            begun.set()

    def command(arguments):
        begun = threading.Event()
        for _ in range(3):
            threading.Thread(target=in_jax, args=(begun,), daemon=True).start()
        assert begun.wait(60)
        atexit.register(print, "registered", end="")
        print("said", end=" ")
        if "fails" in arguments:
            raise RuntimeError("a bug")
        return 7

    name = sys.argv[1]
    cli.COMMANDS[name] = (command, "", "")
    cli.script()
    """
)


def ends(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BUSY, *words]
    # jax warns of an entry that a killed process has left half written.
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", cli.MEMBERS)
def test_a_member_ends_in_order_while_threads_are_in_jax(name):
    """An abort would say -6 to its launcher, and nothing of the reason to its log."""
    done, failed = ends(name), ends(name, "fails")
    assert (done.returncode, done.stdout) == (7, "said registered")
    assert (failed.returncode, failed.stdout) == (EXIT_FAILED, "said registered")
    first, *_, last = failed.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "RuntimeError: a bug"


AWAY = textwrap.dedent(
    """
    import sys, time
    from diloco_jax import cli

    def command(arguments):
        print("up", flush=True)  # As it would import jax.
        time.sleep(60)

    cli.COMMANDS[sys.argv[1]] = (command, "", "")
    cli.script()
    """
)
CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
"""A container's first process is number 1 of its own."""


@pytest.mark.parametrize("name", cli.MEMBERS)
def test_the_first_process_of_a_container_ends_at_a_notice_that_comes_early(name):
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("this machine makes no containers for its users")
    line = [*CONTAINER, sys.executable, "-c", AWAY, name]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout.readline() == "up\n"
        numbers = pathlib.Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
        (first,) = map(int, numbers.read_text().split())
        os.kill(first, signal.SIGTERM)
        assert outside.wait(30) == 128 + signal.SIGTERM
