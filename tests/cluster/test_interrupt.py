"""What asks a process to end."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from diloco_jax.cluster.interrupt import Interrupt, as_keyboard_interrupt


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
    with Interrupt() as interrupt, _signals() as sending:
        while sending():
            interrupt.wait(1e-4)
        interrupt.wait(0.0)
        began = time.monotonic()
        interrupt.wait(0.05)
        assert time.monotonic() - began > 0.04, "all were waited for"
        assert interrupt.count > 100


@contextlib.contextmanager
def _signals(senders=4):
    """100,000 from each; says whether they still come. Few frames are left, as on a
    machine where handlers would be interrupted by themselves more often than here.
    """
    send = "import os\nfor _ in range(100_000): os.kill(os.getppid(), 2)"
    limit = sys.getrecursionlimit()
    processes = [subprocess.Popen([sys.executable, "-c", send]) for _ in range(senders)]
    sys.setrecursionlimit(len(inspect.stack(0)) + 20)
    try:
        yield lambda: any(process.poll() is None for process in processes)
    finally:
        sys.setrecursionlimit(limit)
        for process in processes:
            process.wait()


def test_a_signal_ends_a_wait(hangup):
    with Interrupt() as interrupt:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP))
        timer.start()
        interrupt.wait(60.0)
        assert interrupt.count == 1


@pytest.mark.parametrize("context", [Interrupt, as_keyboard_interrupt])
def test_a_closed_terminal_is_nothing_to_what_nohup_started(hangup, context):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with context() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
    assert interrupt is None or interrupt.count == 0
