"""The end of a process whose threads may be in C++.

As Python ends it stops daemon threads where they next ask for the interpreter. One that
does so from within JAX or gRPC aborts the process, which hides its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def end_when_asked() -> None:
    """End this process at SIGINT and SIGTERM until it handles these itself, also where
    a script ignores SIGINT for what it starts with `&`. The first process of a
    container must say so: the kernel brings it no signal that it does not handle, and a
    notice during its first seconds, as it imports jax, would be lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _asked_to_end)


def _asked_to_end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def end_process(exit_code: int) -> NoReturn:
    """End this process without the end of Python: run what was registered for the exit,
    then leave. Other threads are stopped wherever they are."""
    atexit._run_exitfuncs()
    leave_at_once(exit_code)


def leave_at_once(exit_code: int) -> NoReturn:
    """End this process with its output written, and nothing else done. At an exit JAX
    would wait for the other hosts of an island, and abort when they are gone."""
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # Nobody reads it, or closed.
            stream.flush()
    os._exit(exit_code)
