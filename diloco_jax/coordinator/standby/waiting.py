"""A standby's answers to islands and people: come again, or ask the primary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from diloco_jax.protocol import messages
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import Busy
from diloco_jax.wire.fetch_source import FetchSource
from diloco_jax.wire.profiling import NoProfiles
from diloco_jax.wire.session import Session


class Waiting(NoProfiles):
    """`Handlers` of the wire's server while this node does not lead."""

    def __init__(self, shown: Callable[[], dict[str, Any]]) -> None:
        """shown: returns what `diloco status` shows of this standby."""
        self._shown = shown

    def connect(self, hello: messages.Hello, session: Session) -> None:
        """Raise Busy: the island tries the other address, then this one again."""
        self._turn_away()

    def receive(
        self, session: Session, message: messages.Report | messages.Goodbye
    ) -> None:
        """Ignore it: no session is open."""

    def disconnect(self, session: Session) -> None:
        """Ignore it: no session is open."""

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Raise Busy."""
        self._turn_away()

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Raise Busy."""
        self._turn_away()

    def fetch(self, request: bulk.FetchRequest) -> FetchSource:
        """Raise Busy."""
        self._turn_away()

    def kept(self, cycle: int, name: str) -> memoryview:
        """Raise Busy."""
        self._turn_away()

    def keep(self, cycle: int) -> dict[str, Any]:
        """Raise Busy."""
        self._turn_away()

    def steer(self, order: messages.Steer) -> dict[str, Any]:
        """Raise Busy."""
        self._turn_away()

    def status(self) -> dict[str, Any]:
        """Raise Busy, with what is known of the primary."""
        self._turn_away()

    def _turn_away(self) -> NoReturn:
        shown = self._shown()
        raise Busy(
            f"this is standby {shown['node']} of {shown['primary']}: "
            f"{shown['state']}, {'in step' if shown['in_step'] else 'not in step'}, "
            f"with everything up to {shown['have']}; ask the primary"
        )
