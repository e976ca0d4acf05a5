"""For tests of what a signal ends."""

import time

import pytest

PATIENCE_S = 60.0


def until_it_is_raised():
    """Goes on like a command; a request to end is raised here, within the deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        pass
    pytest.fail("goes on after the signal")
