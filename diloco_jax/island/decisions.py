"""What to do at a step boundary: two sources for one and the same loop.

`LiveDecisions` passes on what came in, at once. `ScriptedDecisions` waits for the
takes and adoptions of a fixed script, the one of `core/round.py`, so that a run over
the network can be compared with it bit for bit.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from diloco_jax.island.mailbox import Arrival, Inbox, Mailbox


class ScriptError(RuntimeError):
    """What a script waits for did not come in time, or something else came."""


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


class ScriptedDecisions:
    """Tick n (from 1) is taken at step floor(n H / P) and adopted `overlap_steps`
    later; once stepping has ended, adoptions still due come before further takes.

    Raises ScriptError from `at` if a request or an arrival is not there within
    `patience_s`, or one comes that the script does not have.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        steps_per_cycle: int,
        fragments: int,
        overlap_steps: int,
        patience_s: float,
    ) -> None:
        self._mailbox = mailbox
        self._steps_per_cycle = steps_per_cycle
        self._fragments = fragments
        self._overlap_steps = overlap_steps
        self._patience_s = patience_s
        self._next_tick = 1
        self._requested: dict[int, int] = {}
        self._arrived: dict[int, Arrival] = {}
        self._due: list[tuple[int, int]] = []
        """(step, fragment) of adoptions to come, in order."""

    def at(self, step: int, *, stepping: bool) -> Inbox:
        """See Decisions."""
        inbox = self._mailbox.collect()
        self._keep(inbox)
        takes: dict[int, int] = {}
        arrivals: list[Arrival] = []
        deadline = time.monotonic() + self._patience_s
        while True:
            arrivals += self._due_arrivals(step, stepping)
            takes |= self._due_takes(step, stepping)
            missing = self._missing(step, stepping)
            if not missing:
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ScriptError(
                    f"step {step}: no {missing} within {self._patience_s} s; the "
                    f"coordinator does not follow the script of this island"
                )
            self._mailbox.wait(remaining)
            later = self._mailbox.collect()
            self._keep(later)
            inbox = inbox.followed_by(later)
        if stepping:
            self._due += [(step + self._overlap_steps, f) for f in takes]
        return dataclasses.replace(
            inbox,
            takes=takes,
            arrivals=tuple(arrivals),
            # Without overlap a take is answered at the boundary at which it is made.
            again=stepping and bool(takes) and self._overlap_steps == 0,
        )

    def wait(self, timeout_s: float) -> None:
        """See Decisions."""
        self._mailbox.wait(timeout_s)

    def _keep(self, inbox: Inbox) -> None:
        for fragment, tick in inbox.takes.items():
            self._requested[tick] = fragment
        for arrival in inbox.arrivals:
            waiting = self._arrived.get(arrival.fragment)
            if waiting is not None or len(arrival.publishes) > 1:
                raise ScriptError(
                    f"fragment {arrival.fragment} came as version {arrival.version} "
                    f"before the one ahead of it was due; raise steps_per_cycle above "
                    f"overlap_steps = {self._overlap_steps}"
                )
            self._arrived[arrival.fragment] = arrival

    def _due_arrivals(self, step: int, stepping: bool) -> list[Arrival]:
        due = [f for s, f in self._due if s <= step or not stepping]
        here = [self._arrived.pop(f) for f in due if f in self._arrived]
        gone = {arrival.fragment for arrival in here}
        self._due = [(s, f) for s, f in self._due if f not in gone]
        if not stepping and not self._due:
            # What the flush publishes is on no script.
            here += self._arrived.values()
            self._arrived = {}
        return here

    def _due_takes(self, step: int, stepping: bool) -> dict[int, int]:
        takes: dict[int, int] = {}
        if not stepping:
            if not self._due:
                takes = {f: tick for tick, f in self._requested.items()}
                self._requested = {}
            return takes
        while self._step_of(self._next_tick) <= step:
            if self._next_tick not in self._requested:
                break
            takes[self._requested.pop(self._next_tick)] = self._next_tick
            self._next_tick += 1
        return takes

    def _missing(self, step: int, stepping: bool) -> str:
        if self._mailbox.ending is not None:
            return ""
        for due, fragment in self._due:
            if due <= step or not stepping:
                return f"arrival of fragment {fragment}"
        if stepping and not self._mailbox.stop_asked:
            tick = self._next_tick
            if self._step_of(tick) <= step:
                return f"take request of tick {tick}"
        return ""

    def _step_of(self, tick: int) -> int:
        return tick * self._steps_per_cycle // self._fragments


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
