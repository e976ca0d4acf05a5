"""Processes that never outlive the one that started them.

A child leads a process group and a session of its own, so that Ctrl-C reaches the
launcher alone. On Linux the kernel kills it when the launcher dies, however that
happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

GUARD = Path(__file__).with_name("guard.py")


def start_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: BinaryIO | int,
    stderr: BinaryIO | int,
    *,
    stdin: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command that dies with this process, in a group of its own.

    pass_fds: open files that the child inherits under their numbers.
    """
    guard = [sys.executable, "-IS", str(GUARD), str(os.getpid())]
    return subprocess.Popen(
        [*guard, *command] if sys.platform == "linux" else command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **environment},
        start_new_session=True,
        pass_fds=pass_fds,
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a child and to all processes in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
