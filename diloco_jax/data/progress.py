"""Progress of a reading that may take minutes: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import threading
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


class ReadProgress:
    """A context manager that tells how much of `total` bytes is read, unless that is
    less than `told_from`. Any thread may call `advance`."""

    def __init__(self, what: str, total: int, *, told_from: int) -> None:
        """what: the beginning of every line, which also names the remedy."""
        self._what, self._total = what, total
        self._told = total >= told_from
        self._lock = threading.Lock()
        self._done, self._next_line_s = 0, 0.0
        self._bar: Progress | None = None

    def __enter__(self) -> ReadProgress:
        if not self._told:
            return self
        # Seen without logging, too: a command may read before it has set that up.
        logger.warning("%s (%.1f GB)", self._what, self._total / 1e9)
        if sys.stderr.isatty():
            self._bar = Progress(
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        self._next_line_s = time.monotonic() + LINE_EVERY_S
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """Note that so many more bytes are read."""
        if not self._told:
            return
        with self._lock:
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
            elif (now := time.monotonic()) >= self._next_line_s:
                self._next_line_s = now + LINE_EVERY_S
                logger.warning(
                    "read %.1f of %.1f GB", self._done / 1e9, self._total / 1e9
                )
