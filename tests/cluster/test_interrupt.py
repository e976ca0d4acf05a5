"""What asks a process to end."""

from __future__ import annotations

import os
import signal

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


@pytest.mark.parametrize("context", [Interrupt, as_keyboard_interrupt])
def test_a_closed_terminal_is_nothing_to_what_nohup_started(hangup, context):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with context() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
    assert interrupt is None or interrupt.count == 0
