"""Notice that a thread which says regularly that it goes on has stopped saying so."""

from __future__ import annotations

import abc
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks."""


class QuietWatch(abc.ABC):
    """Watches one thread, which calls `touch`, from a thread of its own.

    hangs: called once, on the watch's thread, with what people are to know. A machine
    or process that stands still, as while it is suspended, counts as two looks at most.
    """

    def __init__(
        self,
        limit_s: float,
        hangs: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit_s: longest time between two touches; 0 = any."""
        self.hangs = hangs
        self._limit_s, self._clock = limit_s, clock
        self._touches = 0
        self._seen, self._quiet_s, self._looked = -1, 0.0, clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def start(self) -> None:
        """Watch from now on."""
        self.touch()
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """End the watch."""
        self._ended.set()

    def touch(self) -> None:
        """Note that the thread goes on."""
        self._touches += 1

    def look(self) -> bool:
        """Count the time without a touch; return True if it is over the limit."""
        now, touches = self._clock(), self._touches
        passed_s, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._quiet_s = self._quiet_s + passed_s if touches == self._seen else 0.0
        self._seen = touches
        return 0 < self._limit_s <= self._quiet_s

    @abc.abstractmethod
    def words(self, quiet_s: float) -> str:
        """Return what people are to know after such a silence."""

    def _run(self) -> None:
        self._looked = self._clock()
        while not self._ended.wait(LOOK_S):
            if self.look():
                self._tell()
                return

    def _tell(self) -> None:
        text = self.words(self._quiet_s)
        logger.error("%s; its threads are at:", text)
        try:
            faulthandler.dump_traceback(sys.stderr)
        except (OSError, ValueError, AttributeError) as error:  # It has no file.
            logger.error("no stack could be written: %s", error)
        self.hangs(text)
