"""Watch over an island's start and its train loop, and end a process that hangs.

Such a process first says where it hangs. Its supervisor then starts it again.

A device, a compiler or a collective that hangs holds the main thread for ever, while
the thread that reports goes on: to the coordinator, such an island is alive.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from diloco_jax.exit_codes import EXIT_FAILED
from diloco_jax.island.loop import Loop
from diloco_jax.process_end import leave_at_once
from diloco_jax.protocol.island.boundary import Ending

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks."""


class HangWatch:
    """Watches one process: the parts of its start, then its loop, which calls `touch`
    at its boundaries.

    hangs: called once, on the watch's thread, with what people are to know. A machine
    that stands still, as while it is suspended, counts as two looks at most.
    """

    def __init__(
        self,
        budget_s: float,
        hangs: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """budget_s: longest time between two touches, and longest time of a part of the
        start beyond what it may take; 0 = any."""
        self.hangs = hangs
        self._budget_s, self._clock = budget_s, clock
        self._limit_s, self._part = budget_s, ""
        self._touches = 0
        self._seen, self._quiet_s, self._looked = -1, 0.0, clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang", daemon=True)

    def __enter__(self) -> HangWatch:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def begin(self, part: str, lasts_s: float, setting: str) -> None:
        """Watch a part of the start from now on, which may take `lasts_s`, as `setting`
        says."""
        self.touch()
        self._limit_s = self._budget_s and lasts_s + self._budget_s
        self._part = f"{part} may take {lasts_s:.0f} s ({setting}), and "
        logger.info("%s begins", part)
        if self._thread.ident is None:
            self._thread.start()

    def run(self, loop: Loop) -> Ending:
        """Run the loop under this watch."""
        self.touch()
        self._limit_s, self._part = self._budget_s, ""
        loop.touch = self.touch
        if self._thread.ident is None:
            self._thread.start()
        return loop.run()

    def end(self) -> None:
        """End the watch."""
        self._ended.set()

    def touch(self) -> None:
        """Note that the loop goes on."""
        self._touches += 1

    def look(self) -> bool:
        """Count the time without a touch; return True if it is over the budget."""
        now, touches = self._clock(), self._touches
        passed_s, self._looked = min(now - self._looked, 2 * LOOK_S), now
        self._quiet_s = self._quiet_s + passed_s if touches == self._seen else 0.0
        self._seen = touches
        return 0 < self._limit_s <= self._quiet_s

    def _run(self) -> None:
        self._looked = self._clock()
        while not self._ended.wait(LOOK_S):
            if self.look():
                self._tell()
                return

    def _tell(self) -> None:
        text = (
            f"hangs: no step and no boundary for {self._quiet_s:.0f} s; {self._part}"
            f"placement.hang_budget_s = {self._budget_s:g}; a device, a compiler or a "
            f"collective does not answer"
        )
        logger.error("%s; its threads are at:", text)
        try:
            faulthandler.dump_traceback(sys.stderr)
        except (OSError, ValueError, AttributeError) as error:  # It has no file.
            logger.error("no stack could be written: %s", error)
        self.hangs(text)


def end_hanging(stop: Callable[[Ending], None], text: str, within_s: float) -> NoReturn:
    """End a process whose loop hangs; say goodbye by `stop` if there is time."""
    ending = Ending(EXIT_FAILED, text)
    goodbye = threading.Thread(target=stop, args=(ending,), name="goodbye", daemon=True)
    goodbye.start()
    goodbye.join(within_s)
    leave_at_once(EXIT_FAILED)
