"""Processes that never outlive the one that started them.

A child leads a process group and a session of its own, so that Ctrl-C reaches the
launcher alone. On Linux the kernel kills it when the launcher dies, however that
happens. To the kernel the launcher is the thread that started the child, so one thread,
which lasts as long as the process, starts them all.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

from diloco_jax.core.members import importable

GUARD = Path(__file__).with_name("guard.py")

_Asked = tuple["Future[Any]", Sequence[str], dict[str, Any]]
_asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
_starting = threading.Lock()
_starter: threading.Thread | None = None


def start_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: BinaryIO | int,
    stderr: BinaryIO | int,
    *,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command that dies with this process, in a group of its own.

    pass_fds: open files that the child inherits under their numbers.
    """
    guard = [sys.executable, "-IS", str(GUARD), str(os.getpid())]
    settings = {
        "stdin": subprocess.DEVNULL,
        "stdout": stdout,
        "stderr": stderr,
        "env": {**os.environ, **importable(), **environment},
        "start_new_session": True,
        "pass_fds": pass_fds,
    }
    _require_starter()
    made: Future[Any] = Future()
    whole = [*guard, *command] if sys.platform == "linux" else command
    _asked.put((made, whole, settings))
    process: subprocess.Popen[bytes] = made.result()
    return process


def _require_starter() -> None:
    """Have the thread that starts children. A fork of this process is without it."""
    global _starter
    with _starting:
        if _starter is None or not _starter.is_alive():
            # Not joined at exit, which would end the children first.
            _starter = threading.Thread(target=_start, daemon=True)
            _starter.start()


def _start() -> None:
    while True:
        made, command, settings = _asked.get()
        try:
            made.set_result(subprocess.Popen(command, **settings))
        except BaseException as error:
            made.set_exception(error)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a child and to all processes in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
