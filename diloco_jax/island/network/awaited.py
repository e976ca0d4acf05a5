"""Say, now and then, that a coordinator is waited for, which is not there yet."""

from __future__ import annotations

import logging

from diloco_jax.deadlines import Deadlines

logger = logging.getLogger(__name__)


class Awaited:
    """The wait for one coordinator: told at its first failure, then once in
    `pin_s`."""

    def __init__(self, deadlines: Deadlines, began: float) -> None:
        """began: time of the clock of `tell`."""
        self._every_s, self._began, self._tell_at = deadlines.pin_s, began, began

    def tell(self, error: Exception, now: float, until: float) -> None:
        """Log why it is waited for, for how long already, and until when at most."""
        if now < self._tell_at:
            return
        self._tell_at = now + self._every_s
        logger.warning(
            "waits for the coordinator, for %.0f s of at most %.0f: %s",
            now - self._began,
            until - self._began,
            error,
        )
