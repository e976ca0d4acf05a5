"""Signals that ask a process to end."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from interruption import until_it_is_raised

from diloco_jax import cli, process
from diloco_jax.island.watches import ended_by_signals
from diloco_jax.process import (
    RAISES,
    Interrupt,
    Interruptible,
    end_when_asked,
    heeding_signals,
)

SIGNALS = 3000


@pytest.fixture
def hangup():
    """SIGHUP as a shell leaves it; set back afterwards."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_requests_to_end_are_counted(hangup, number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert interrupt.count == 2
    assert signal.getsignal(number) is before


@pytest.mark.timeout(60, method="thread")
def test_signals_that_come_during_anything_hang_nothing():
    with Interrupt() as interrupt:
        with _signals():
            while interrupt.count < SIGNALS:
                interrupt.wait(1e-4)
        interrupt.wait(0.0)
        began = time.monotonic()
        interrupt.wait(0.05)
        assert time.monotonic() - began > 0.04, "all were waited for"


@contextlib.contextmanager
def _signals(senders=4):
    """Send SIGINT without a pause. The kernel joins those that find one pending, so how
    many arrive in a second depends on the machine. Few frames are left, as on a machine
    where handlers would be interrupted by themselves more often than here.
    """
    send = "import os\nwhile True: os.kill(os.getppid(), 2)"
    limit = sys.getrecursionlimit()
    processes = [subprocess.Popen([sys.executable, "-c", send]) for _ in range(senders)]
    sys.setrecursionlimit(len(inspect.stack(0)) + 20)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
        for process in processes:
            process.kill()
            process.wait()


def test_a_signal_ends_a_wait(hangup):
    with Interrupt() as interrupt:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP))
        timer.start()
        interrupt.wait(60.0)
        assert interrupt.count == 1


def interrupted(work):
    """Return True if a request to end was raised in it."""
    try:
        with Interruptible():
            work()
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_raised_and_all_is_as_before(hangup, number):
    def state():
        return [signal.getsignal(n) for n in (number, RAISES)], sys.unraisablehook

    def work():
        os.kill(os.getpid(), number)
        until_it_is_raised()

    before = state()
    assert interrupted(work)
    assert state() == before
    assert not any("_watch" in thread.name for thread in threading.enumerate())


IMPORTED = """
import os, signal, time
from diloco_jax import cli, process
looked, imports = [], process._imports
def looks(frame):
    looked.append(imports(frame))
    return looked[-1]
process._imports = looks
os.kill(os.getpid(), signal.SIGINT)
deadline = time.monotonic() + 60
while not looked and time.monotonic() < deadline:
    pass
whole = True
"""


def test_nothing_is_raised_within_an_import(tmp_path, monkeypatch):
    """Half of a library in C is worse than none: some end the process by a signal."""
    (tmp_path / "imported_late.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "_imports", process._imports)
    whole = []

    def work():
        whole.append(importlib.import_module("imported_late").whole)
        until_it_is_raised()

    assert interrupted(work)
    assert whole == [True]


TWICE = """
import os, signal
from diloco_jax.process import Interruptible
ears, _ = os.pipe()
with Interruptible():
    while True:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            os.read(ears, 1)
        except KeyboardInterrupt:
            pass  # What cleans up, and does not look at anything.
"""
FLOOD = """
import inspect, os, subprocess, sys
from diloco_jax.process import Interruptible
send = "import os\\nfor _ in range(100_000): os.kill(os.getppid(), 2)"
ears, _ = os.pipe()
sys.setrecursionlimit(len(inspect.stack(0)) + 60)
with Interruptible():
    try:
        for _ in range(4):
            subprocess.Popen([sys.executable, "-c", send], start_new_session=True)
        os.read(ears, 1)
    finally:
        os.read(ears, 1)
"""


@pytest.mark.parametrize("code", [TWICE, FLOOD], ids=["twice", "flood"])
def test_a_second_request_ends_the_process_at_once(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    told = "error: interrupted twice, ended at once\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_request_to_end_that_is_discarded_once_ends_a_command(monkeypatch, capsys):
    """As a callback of the garbage collector discards it, of which jax has one."""
    called = []

    def callback(phase, info):
        if not called:
            called.append(phase)
            os.kill(os.getpid(), signal.SIGINT)
            until_it_is_raised()

    def command(arguments):
        gc.callbacks.append(callback)
        try:
            gc.collect()
            until_it_is_raised()
        finally:
            gc.callbacks.remove(callback)

    monkeypatch.setitem(cli.COMMANDS, "plan", (command, "", ""))
    assert cli.main(["plan"]) == 1
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_process_of_a_run_hears_the_same_signals(hangup, number, ignored):
    """Scripts ignore SIGINT for what they start with `&`, and nohup SIGHUP."""
    before = signal.getsignal(number)
    heard, asked = [], threading.Event()

    def note(number, frame=None):
        heard.append(number)
        asked.set()

    def note_island(name):
        note(signal.Signals[name])

    if ignored:
        signal.signal(number, signal.SIG_IGN)
    try:
        with heeding_signals(note):
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is (signal.SIG_IGN if ignored else before)
        expected = [] if ignored and number == signal.SIGHUP else [number]
        assert heard == expected
        asked.clear()
        with ended_by_signals(note_island):
            os.kill(os.getpid(), number)
            assert asked.wait(10 if expected else 0) == bool(expected)
    finally:
        signal.signal(number, before)


def test_a_script_s_background_process_hears_ctrl_c_while_it_starts():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        end_when_asked()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
