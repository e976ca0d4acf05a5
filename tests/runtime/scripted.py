"""Take and adopt by a fixed script, that of `tests/oracle.py`, so that a run over the
network can be compared with it bit for bit."""

from __future__ import annotations

import dataclasses
import time

from diloco_jax.island.mailbox import Arrival, Inbox, Mailbox


class ScriptError(RuntimeError):
    """What a script waits for did not come in time, or something else came."""


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
        """See decisions.Decisions."""
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
            inbox = _both(inbox, later)
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
        """See decisions.Decisions."""
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


def _both(first: Inbox, later: Inbox) -> Inbox:
    """Both as one."""
    return Inbox(
        takes={**first.takes, **later.takes},
        arrivals=first.arrivals + later.arrivals,
        verdicts=first.verdicts + later.verdicts,
        grants=first.grants + later.grants,
        anchors=first.anchors + later.anchors,
        term=max(first.term, later.term),
        others_tokens=later.others_tokens,
        again=first.again or later.again,
        save=first.save or later.save,
        stop=first.stop or later.stop,
        leaving=first.leaving or later.leaving,
        finished=first.finished or later.finished,
        ending=first.ending or later.ending,
    )
