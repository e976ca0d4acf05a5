"""Helpers for tests with real, small child processes."""

import os
import time

import pytest

DEADLINE_S = 60.0


def wait_until(condition, what):
    """Polls the condition; fails with `what` after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.01)


def is_alive(pid):
    """Return True if the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def until():
    return wait_until


@pytest.fixture
def alive():
    assert is_alive(os.getpid())
    return is_alive
