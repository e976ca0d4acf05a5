"""Watch over an island's start and its train loop, and end a process that hangs.

Such a process first says where it hangs. Its supervisor then starts it again.

A device, a compiler or a collective that hangs holds the main thread for ever, while
the thread that reports goes on: to the coordinator, such an island is alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from diloco_jax.errors import EXIT_FAILED
from diloco_jax.island.loop import Loop
from diloco_jax.process import QuietWatch, leave_at_once
from diloco_jax.protocol.island.boundary import Ending

logger = logging.getLogger(__name__)


class HangWatch(QuietWatch):
    """Watches one island's process: the parts of its start, then its loop, which calls
    `touch` at its boundaries."""

    def __init__(
        self,
        budget_s: float,
        hangs: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """budget_s: longest time between two touches, and longest time of a part of the
        start beyond what it may take; 0 = any."""
        super().__init__(budget_s, hangs, clock)
        self._budget_s, self._part = budget_s, ""

    def begin(self, part: str, lasts_s: float, setting: str) -> None:
        """Watch a part of the start from now on, which may take `lasts_s`, as `setting`
        says."""
        self.touch()
        self._limit_s = self._budget_s and lasts_s + self._budget_s
        self._part = f"{part} may take {lasts_s:.0f} s ({setting}), and "
        logger.info("%s begins", part)
        self.start()

    def run(self, loop: Loop) -> Ending:
        """Run the loop under this watch."""
        self.touch()
        self._limit_s, self._part = self._budget_s, ""
        loop.touch = self.touch
        self.start()
        return loop.run()

    def words(self, quiet_s: float) -> str:
        """See `QuietWatch`."""
        return (
            f"hangs: no step and no boundary for {quiet_s:.0f} s; {self._part}"
            f"placement.hang_budget_s = {self._budget_s:g}; a device, a compiler or a "
            f"collective does not answer"
        )


def end_hanging(stop: Callable[[Ending], None], text: str, within_s: float) -> NoReturn:
    """End a process whose loop hangs; say goodbye by `stop` if there is time."""
    ending = Ending(EXIT_FAILED, text)
    goodbye = threading.Thread(target=stop, args=(ending,), name="goodbye", daemon=True)
    goodbye.start()
    goodbye.join(within_s)
    leave_at_once(EXIT_FAILED)
