"""The part of a server's handlers by which an operator has an island's steps traced."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from diloco_jax.protocol.messages import ProfileOrder
from diloco_jax.wire.bulk import ProfilePart
from diloco_jax.wire.errors import Refused

ENDING = ".xplane.pb"
"""Ending of a trace's file, by which the tools that show it find it."""


class ProfileHandlers(Protocol):
    """Answer an operator's orders, and take what the island sends."""

    def profile(self, order: ProfileOrder) -> dict[str, Any]:
        """Have steps traced; see `Client.profile`. May raise Refused or Busy."""

    def profile_begin(self, part: ProfilePart) -> memoryview:
        """Return the memory for a block of a trace; see `BulkHandlers.upload_begin`."""

    def profile_end(self, part: ProfilePart, place: memoryview) -> bool:
        """Accept a received and checked block; return True if the trace is complete."""

    def trace(self, number: int) -> memoryview:
        """Return the bytes of a trace that is done; may raise Refused."""


class NoProfiles:
    """The handlers of who has no run that trains."""

    def profile(self, order: ProfileOrder) -> dict[str, Any]:
        """Raise Refused."""
        self._no_run()

    def profile_begin(self, part: ProfilePart) -> memoryview:
        """Raise Refused."""
        self._no_run()

    def profile_end(self, part: ProfilePart, place: memoryview) -> bool:
        """Raise Refused."""
        self._no_run()

    def trace(self, number: int) -> memoryview:
        """Raise Refused."""
        self._no_run()

    def _no_run(self) -> NoReturn:
        raise Refused(
            "profile",
            "no island trains here: the run is over, or has yet to begin; see "
            "`diloco status`",
        )
