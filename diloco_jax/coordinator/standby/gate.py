"""The gate of a primary: what others would see of a record waits until it may be seen.

Decisions go on, and so do writing and the tape. Everything else that a decision asks
for is carried out in its order, once the records before it may be shown.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.coordinator.standby.unseated import Unseated
from diloco_jax.protocol.coordinator.events import (
    Alert,
    Ignored,
    Note,
    Outdated,
    Persist,
)

MOST_WAITING = 100_000
"""Effects that may wait: more than a run's messages in an outage budget."""


class GateFullError(RuntimeError):
    """Too much waits to be shown."""


class Gate:
    """Used on the lead's thread alone."""

    def __init__(self, carry_out: Callable[[AnyEffect], None], seat: Unseated) -> None:
        self._carry_out, self._seat = carry_out, seat
        self._needs = 0
        """Number of the last record, in log or tape."""
        self._waiting: collections.deque[tuple[int, Callable[[], None]]] = (
            collections.deque()
        )

    @property
    def empty(self) -> bool:
        """True if nothing waits."""
        return not self._waiting

    def carry_out(self, effect: AnyEffect) -> None:
        """Carry out an effect, now or in its turn."""
        match effect:
            case Persist() | Note():
                # An island that hears that its facts are recorded forgets them: they
                # must be in the standby's tape, too.
                self._carry_out(effect)
                self._needs = self._seat.written
            case Ignored() | Alert() | Outdated():
                self._carry_out(effect)
            case _:
                self.when_shown(lambda: self._carry_out(effect))

    def when_shown(self, do: Callable[[], None]) -> None:
        """Call a function once everything before it may be seen."""
        if len(self._waiting) >= MOST_WAITING:
            raise GateFullError(
                f"{len(self._waiting)} effects wait for the mandate or the standby; "
                f"look at the object of placement.mandate, and start again"
            )
        self._waiting.append((self._needs, do))
        self.flush()

    def flush(self) -> None:
        """Carry out what may be seen by now."""
        while self._waiting and self._seat.may_show(self._waiting[0][0]):
            self._waiting.popleft()[1]()
