"""What to do at a step boundary: what came in, at once or when it is due.

The runtime tests have another source, a fixed script (tests/runtime/scripted.py).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Protocol

from diloco_jax.island.mailbox import Inbox, Mailbox


class Decisions(Protocol):
    """A source of decisions."""

    def at(self, step: int, *, stepping: bool) -> Inbox:
        """What to do at the boundary before `step`; `stepping`: steps will follow."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Returns when something may have come in since `at`, or in time."""
        ...


class LiveDecisions:
    """Whatever came in by now, but for takes that are put off: those come as many steps
    later, or once no steps follow. Never waits. save_due: whether it is time for a
    checkpoint."""

    def __init__(self, mailbox: Mailbox, save_due: Callable[[], bool]) -> None:
        self._mailbox, self._save_due = mailbox, save_due
        self._put_off: dict[int, tuple[int, int]] = {}
        """Tick, and the step at which it is due, by fragment."""

    def at(self, step: int, *, stepping: bool) -> Inbox:
        """See Decisions."""
        inbox = self._mailbox.collect()
        if self._put_off or (inbox.takes and inbox.put_off):
            takes = self._due_takes(inbox, step, stepping=stepping)
            inbox = dataclasses.replace(inbox, takes=takes, put_off=0)
        if stepping and self._save_due():
            inbox = dataclasses.replace(inbox, save=True)
        return inbox

    def wait(self, timeout_s: float) -> None:
        """See Decisions."""
        self._mailbox.wait(timeout_s)

    def _due_takes(self, inbox: Inbox, step: int, *, stepping: bool) -> dict[int, int]:
        if inbox.term:
            self._put_off = {}  # Of a coordinator that lost its state.
        for fragment, tick in inbox.takes.items():
            if self._put_off.get(fragment, (-1,))[0] != tick:  # Or it is asked again.
                self._put_off[fragment] = tick, step + inbox.put_off
        takes = {
            fragment: tick
            for fragment, (tick, due) in self._put_off.items()
            if due <= step or inbox.stop or not stepping
        }
        for fragment in takes:
            del self._put_off[fragment]
        return takes


class Ahead:
    """What is decided, and done `lead` boundaries later: an island's hosts agree on it
    until then."""

    def __init__(self, lead: int) -> None:
        self._decided = collections.deque([Inbox()] * lead)
        self._now = Inbox()

    def next(self, fresh: Inbox) -> Inbox:
        """What to do at this boundary, at which `fresh` is decided."""
        self._decided.append(fresh)
        self._now = self._decided.popleft()
        return self._now

    @property
    def pending(self) -> bool:
        """Whether anything is still to be done."""
        return any(_is_news(inbox, self._now) for inbox in self._decided)


def _is_news(inbox: Inbox, now: Inbox) -> bool:
    """Whether an inbox says anything that is not so already."""
    return bool(
        inbox.takes
        or inbox.arrivals
        or inbox.verdicts
        or inbox.grants
        or inbox.anchors
        or inbox.term
        or (inbox.stop, inbox.leaving, inbox.finished, inbox.ending)
        != (now.stop, now.leaving, now.finished, now.ending)
    )
