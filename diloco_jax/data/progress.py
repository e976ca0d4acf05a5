"""Progress of a reading that may take minutes."""

from __future__ import annotations

import contextlib
import logging
import threading

from rich.console import Console

from diloco_jax.observability.terminal import bar

logger = logging.getLogger(__name__)


class ReadProgress:
    """A context manager that tells how much of `total` bytes is read, unless that is
    less than `told_from`. Any thread may call `advance`."""

    def __init__(self, what: str, total: int, *, told_from: int) -> None:
        """what: the beginning of every line, which also names the remedy."""
        self._what, self._total = what, total
        self._told = total >= told_from
        self._lock = threading.Lock()
        self._done = 0
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> ReadProgress:
        if self._told:
            # Seen without logging, too: a command may read before it has set that up.
            logger.warning("%s (%.1f GB)", self._what, self._total / 1e9)
            doing = bar(Console(stderr=True), "reading")
            self._report = self._shown.enter_context(doing)
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.close()

    def advance(self, nbytes: int) -> None:
        """Note that so many more bytes are read."""
        if not self._told:
            return
        with self._lock:
            self._done += nbytes
            self._report(self._done / self._total)
