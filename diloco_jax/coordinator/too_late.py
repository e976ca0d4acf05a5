"""Tell islands that come after the end of the run that it is over.

A slice may have waited for its machines for longer than the run took. An island that
finds nobody would try again, on machines that cost; one that is told ends with 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

from diloco_jax.coordinator import service
from diloco_jax.coordinator.lead import Lead
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import members
from diloco_jax.wire.errors import Refused
from diloco_jax.wire.session import Handlers, Session

logger = logging.getLogger(__name__)

POLL_S = 0.2


class AfterEndHandlers(Handlers):
    """The answers of the wire's server once the run is over."""

    def __init__(self, lead: Lead, status: dict[str, Any]) -> None:
        """lead: of the ended run. status: what `diloco status` shows from here on."""
        self._config, self._state, self._status = lead.config, lead.state, status

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Raise Refused, as the protocol says it."""
        service.check_hello(hello)
        refusal = members.entry_refusal(self._config, self._state, hello)
        assert refusal is not None  # Nobody is let into a run that is over.
        raise Refused(refusal.code, refusal.message)

    def status(self) -> dict[str, Any]:
        """Return the status at the end."""
        return self._status

    def refuse(self) -> NoReturn:
        """Refuse any call of an ended run."""
        raise Refused(
            "finished",
            "the run is over; its results are in the coordinator's workdir, from which "
            "`diloco export WORKDIR DIR` reads",
        )


def wait(seconds: float, asked_to_end: Callable[[], bool]) -> None:
    """Wait that long, or until the process is asked to end."""
    if seconds:
        logger.info("for %g s islands that come are told that it is over", seconds)
    until = time.monotonic() + seconds
    while not asked_to_end() and (left := until - time.monotonic()) > 0:
        time.sleep(min(POLL_S, left))
