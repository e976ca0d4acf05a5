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
from diloco_jax.wire import bulk
from diloco_jax.wire.bulk_server import FetchSource
from diloco_jax.wire.errors import Refused
from diloco_jax.wire.session import Session

logger = logging.getLogger(__name__)

POLL_S = 0.2


class TooLate:
    """`Handlers` of the wire's server once the run is over."""

    def __init__(self, lead: Lead, status: dict[str, Any]) -> None:
        """lead: of the ended run. status: what `diloco status` shows from here on."""
        self._config, self._state, self._status = lead.config, lead.state, status

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Raise Refused, as the protocol says it."""
        service.check_hello(hello)
        refusal = members.entry_refusal(self._config, self._state, hello)
        assert refusal is not None  # Nobody is let into a run that is over.
        raise Refused(refusal.code, refusal.message)

    def receive(
        self, session: Session, message: messages.Report | messages.Goodbye
    ) -> None:
        """Ignore it: no session is open."""

    def disconnect(self, session: Session) -> None:
        """Ignore it: no session is open."""

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Raise Refused."""
        self._refuse()

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Raise Refused."""
        self._refuse()

    def fetch(self, request: bulk.FetchRequest) -> FetchSource:
        """Raise Refused."""
        self._refuse()

    def kept(self, cycle: int, name: str) -> memoryview:
        """Raise Refused."""
        self._refuse()

    def keep(self, cycle: int) -> dict[str, Any]:
        """Raise Refused."""
        self._refuse()

    def steer(self, order: messages.Steer) -> dict[str, Any]:
        """Raise Refused."""
        self._refuse()

    def profile(self, order: messages.ProfileOrder) -> dict[str, Any]:
        """Raise Refused."""
        self._refuse()

    def status(self) -> dict[str, Any]:
        """Return the status at the end."""
        return self._status

    def _refuse(self) -> NoReturn:
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
