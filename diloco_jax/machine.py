"""The machine under a process: the processor cores that it may use."""

from __future__ import annotations

import os
import sys


def cores() -> int:
    """Count the cores that the system lets this process use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
