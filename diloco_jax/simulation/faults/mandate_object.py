"""The object of the mandate in a world of faults: a third party with generations."""

from __future__ import annotations

from diloco_jax.protocol.standby.events import (
    FromStore,
    MandateRead,
    MandateWritten,
    ReadMandate,
    WriteMandate,
    WriteRefused,
)
from diloco_jax.protocol.standby.mandate import NO_GENERATION, Mandate


class MandateObject:
    """One object, as every `coordinator.mandates.store.MandateStore` keeps it."""

    def __init__(self) -> None:
        self.mandate: Mandate | None = None
        self._writes = 0

    def carry_out(self, request: ReadMandate | WriteMandate) -> FromStore:
        """Read it, or write it if it is at the generation that the request names."""
        now = str(self._writes) if self._writes else NO_GENERATION
        if isinstance(request, ReadMandate):
            return MandateRead(generation=now, mandate=self.mandate)
        if request.generation != now:
            return WriteRefused()
        self._writes += 1
        self.mandate = request.mandate
        return MandateWritten(generation=str(self._writes))

    def remove(self) -> None:
        """Remove it, as a person may once both coordinators have ended."""
        self.mandate, self._writes = None, self._writes + 1
