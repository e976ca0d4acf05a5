"""Take and adopt by a fixed script, that of `tests/oracle.py`, so that a run over the
network can be compared with it bit for bit."""

from __future__ import annotations

import time

from msgspec.structs import replace

from diloco_jax.island.mailbox import Mailbox
from diloco_jax.protocol.island.boundary import Adoption, Decision
from diloco_jax.protocol.messages import TakeRequest


class ScriptError(RuntimeError):
    """The script's next event did not come in time, or another one came."""


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
        self._stop = False
        self._requested: dict[int, TakeRequest] = {}
        """By tick."""
        self._arrived: dict[int, Adoption] = {}
        """By fragment."""
        self._due: list[tuple[int, int]] = []
        """(step, fragment) of adoptions to come, in order."""

    def at(self, step: int, *, stepping: bool) -> Decision:
        """See decisions.Decisions."""
        decision = self._mailbox.decide()
        self._keep(decision)
        takes: list[TakeRequest] = []
        adoptions: list[Adoption] = []
        deadline = time.monotonic() + self._patience_s
        while True:
            adoptions += self._due_adoptions(step, stepping)
            takes += self._due_takes(step, stepping)
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
            later = self._mailbox.decide()
            self._keep(later)
            decision = _both(decision, later)
        if stepping:
            self._due += [(step + self._overlap_steps, t.fragment) for t in takes]
        return replace(
            decision,
            takes=tuple(takes),
            adoptions=tuple(adoptions),
            # Without overlap a take is answered at the boundary at which it is made.
            again=stepping and bool(takes) and self._overlap_steps == 0,
        )

    def wait(self, timeout_s: float) -> None:
        """See decisions.Decisions."""
        self._mailbox.wait(timeout_s)

    def _keep(self, decision: Decision) -> None:
        self._stop = decision.stop
        for take in decision.takes:
            # The script says when, not the coordinator.
            self._requested[take.tick] = replace(take, after=0)
        for adoption in decision.adoptions:
            fragment, version = adoption
            if fragment in self._arrived:
                raise ScriptError(
                    f"fragment {fragment} came as version {version} before the one "
                    f"ahead of it was due; raise steps_per_cycle above "
                    f"overlap_steps = {self._overlap_steps}"
                )
            self._arrived[fragment] = adoption

    def _due_adoptions(self, step: int, stepping: bool) -> list[Adoption]:
        due = [f for s, f in self._due if s <= step or not stepping]
        here = [self._arrived.pop(f) for f in due if f in self._arrived]
        gone = {adoption.fragment for adoption in here}
        self._due = [(s, f) for s, f in self._due if f not in gone]
        if not stepping and not self._due:
            # What the flush publishes is on no script.
            here += self._arrived.values()
            self._arrived = {}
        return here

    def _due_takes(self, step: int, stepping: bool) -> list[TakeRequest]:
        takes: list[TakeRequest] = []
        if not stepping:
            if not self._due:
                takes = list(self._requested.values())
                self._requested = {}
            return takes
        while self._step_of(self._next_tick) <= step:
            if self._next_tick not in self._requested:
                break
            takes.append(self._requested.pop(self._next_tick))
            self._next_tick += 1
        return takes

    def _missing(self, step: int, stepping: bool) -> str:
        if self._mailbox.ending is not None:
            return ""
        for due, fragment in self._due:
            if due <= step or not stepping:
                return f"arrival of fragment {fragment}"
        if stepping and not self._stop:
            tick = self._next_tick
            if self._step_of(tick) <= step:
                return f"take request of tick {tick}"
        return ""

    def _step_of(self, tick: int) -> int:
        return tick * self._steps_per_cycle // self._fragments


def _both(first: Decision, later: Decision) -> Decision:
    """Both as one, but for takes and adoptions."""
    return replace(
        later,
        verdicts=first.verdicts + later.verdicts,
        grants=first.grants + later.grants,
        anchors=first.anchors + later.anchors,
        term=max(first.term, later.term),
    )
