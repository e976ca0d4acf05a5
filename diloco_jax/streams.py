"""Standard streams that are closed, or whose reader goes away while a command runs.

A run does not depend on who reads what it says: its logs, tape and summary have it all.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO, cast


def hold_streams(*, unread: bool) -> None:
    """Open the standard streams that are closed, on nothing, and let standard error
    lose its reader. unread: standard output may lose its reader, too.

    Call it before anything else opens a file, which would get the number of a stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free. Children get the streams, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = _lasting(sys.stderr or os.fdopen(2, "w", closefd=False), OSError)
    if unread:
        # A full disk still is an error: only a reader may be missing.
        sys.stdout = _lasting(sys.stdout, BrokenPipeError)


def _lasting(stream: Any, unheard: type[OSError]) -> TextIO:
    """Return a stream to the same file that does not raise this error of writes."""
    raw, unbuffered = _Lasting(stream.fileno(), unheard), stream.write_through
    return io.TextIOWrapper(
        cast(Any, raw if unbuffered else io.BufferedWriter(raw)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=unbuffered,
    )


class _Lasting(io.FileIO):
    def __init__(self, number: int, unheard: type[OSError]) -> None:
        super().__init__(number, "w", closefd=False)
        self._unheard = unheard

    def write(self, octets: Any) -> int:
        try:
            return super().write(octets)
        except self._unheard:
            return memoryview(octets).nbytes
