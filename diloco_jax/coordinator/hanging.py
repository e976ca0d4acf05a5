"""Watch over the coordinator's decisions, and end a process that makes none any more.

A disk, or a piece of code of one's own, that never answers holds the thread of
decisions for ever, while the others go on: such a coordinator accepts islands and
answers `diloco status`, and nothing is merged. Whoever supervises it starts it again,
as after a kill: what was decided and seen is durable.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable

from diloco_jax.config import Placement
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.process import QuietWatch, leave_at_once

TOLD_WITHIN_S = 10.0
"""Most seconds for the last words of a process: its log may be what hangs."""


class TurnWatch(QuietWatch):
    """Watches the lead's turns, each of which ends with a `touch`. A turn that waits
    for space on a full disk touches as it tries again."""

    def __init__(
        self,
        placement: Placement,
        hangs: Callable[[str], None] = lambda text: leave_at_once(EXIT_FAILED),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """placement: with the outage budget of the run's size (`restart_time`). A turn
        may have to wait until the disk has taken what others wrote to it, which is less
        than a restart reads."""
        self._placement = placement
        limit_s = placement.outage_budget_s + placement.deadlines.pin_s
        super().__init__(limit_s, hangs, clock)

    def words(self, quiet_s: float) -> str:
        """See `QuietWatch`."""
        placement = self._placement
        return (
            f"hangs: no turn of the coordinator's decisions has ended for "
            f"{quiet_s:.0f} s; one may take placement.outage_budget_s = "
            f"{placement.outage_budget_s:g} and {placement.deadlines.pin_s:g} s more, "
            f"by placement.time_budget_s = {placement.time_budget_s:g}; the process "
            f"ends, to be started again"
        )

    def _tell(self) -> None:
        # A thread without Python's lock: a pipe that nobody reads may hold that, too.
        # Its exit code is 1, EXIT_FAILED.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(TOLD_WITHIN_S, exit=True, file=nowhere)
        try:
            super()._tell()
        finally:
            faulthandler.cancel_dump_traceback_later()
            os.close(nowhere)
