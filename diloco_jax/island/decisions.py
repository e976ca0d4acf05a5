"""Sources of decisions for the train loop.

The runtime tests have another source, a fixed script (tests/runtime/scripted.py).
Followers take their decisions from host 0 (`hosts/following.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from diloco_jax.island.mailbox import Mailbox
from diloco_jax.protocol.island.decision import Decision


class Decisions(Protocol):
    """A source of decisions."""

    def at(self, step: int, *, stepping: bool) -> Decision:
        """Return the decision for the boundary before `step`; stepping: steps will
        follow."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when something may have come in since `at`, or in time."""
        ...


class LiveDecisions:
    """Decide on what has come in by now; `at` never waits. save_due: asked if it is
    time for a checkpoint."""

    def __init__(self, mailbox: Mailbox, save_due: Callable[[], bool]) -> None:
        self._mailbox, self._save_due = mailbox, save_due

    def at(self, step: int, *, stepping: bool) -> Decision:
        """See Decisions."""
        decision = self._mailbox.decide()
        if stepping and self._save_due():
            decision = replace(decision, save=True)
        return decision

    def wait(self, timeout_s: float) -> None:
        """See Decisions."""
        self._mailbox.wait(timeout_s)
