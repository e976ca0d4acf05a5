"""Faults to inject, written as `WHO@STEP:ACTION`.

WHO is an island (`v5p-a`; `v5p-a#2` for its second incarnation; `v5p-a/1` for its
host 1), `coordinator`, or a worker of it (`worker-1`; `worker-1#2` for its second
process in the run).
STEP counts an incarnation's own inner steps; for the coordinator, its merges; for a
worker, those of the process. ACTION is `kill` (SIGKILL, like a preempted or crashed
host), `pauseS` (SIGSTOP for S seconds, like a stalled host), `hang` (its thread never
goes on, as in a collective that hangs), `nan` or `scaleK` (an island's parameters
become NaN, or K times as large, as on a broken device or an island that lies; at step
0, those of its trial). From that step on, `slowK` makes each of an island's steps K
times as long, as on chips that throttle, and `starveS` each batch late by S seconds, as
from a disk that is too slow. The coordinator and workers are struck once the merge is
committed and before anyone is told; by `kill-prepared`, once it is prepared and not
committed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable

from diloco_jax.errors import ConfigError, suggest

COORDINATOR = "coordinator"
_WORKER = "worker-"

_FORMS = (
    "'NAME@STEP:kill', 'NAME@STEP:pauseSECONDS', 'NAME@STEP:hang', "
    "'NAME@STEP:nan', 'NAME@STEP:scaleFACTOR', 'NAME@STEP:slowFACTOR', "
    "'NAME@STEP:starveSECONDS', 'NAME#INCARNATION@STEP:...', 'NAME/HOST@STEP:...' or "
    "'coordinator@STEP:kill-prepared'; worker-NUMBER is a worker"
)
_PATTERN = re.compile(
    r"(?P<who>[^@#/]+)(?:/(?P<host>\d+))?(?:#(?P<incarnation>[1-9]\d*))?@(?P<step>\d+):"
    r"(?:(?P<plain>kill|kill-prepared|hang|nan)"
    r"|(?P<action>(?:pause|starve)(?=\d)|scale|slow(?=[1-9]))"
    r"(?P<amount>-?\d+(?:\.\d+)?))"
)
# Detached, so that it runs on while its parent is stopped.
_WAKE = "import os,signal,sys,time;time.sleep({s});os.kill({pid},signal.SIGCONT)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    text: str = dataclasses.field(default="", compare=False)
    """As the config has it."""
    who: str
    incarnation: int
    step: int
    action: str
    amount: float = 0.0
    """Seconds or factor of the action."""
    host: int = 0

    @property
    def prepared(self) -> bool:
        """Whether it strikes between a merge's preparation and its commit."""
        return self.action == "kill-prepared"

    @property
    def kills(self) -> bool:
        """Whether it ends the process."""
        return self.action in ("kill", "kill-prepared")

    @property
    def pause_s(self) -> float | None:
        """For how long it stops the process, infinite for a hang; None: it does not."""
        if self.action == "hang":
            return math.inf
        return self.amount if self.action == "pause" else None

    @property
    def factor(self) -> float | None:
        """By what it multiplies the parameters, NaN included; None: it does not."""
        if self.action == "nan":
            return math.nan
        return self.amount if self.action == "scale" else None

    def strike(self) -> None:
        """Strike this process, and not its parameters or steps; return after a pause,
        and never from a kill or a hang."""
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "hang":
            threading.Event().wait()
        elif self.action == "pause":
            wake = _WAKE.format(s=self.amount, pid=os.getpid())
            subprocess.Popen([sys.executable, "-P", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclasses.dataclass(frozen=True)
class Faults:
    """The faults of one process, or of all of them before `for_who`."""

    faults: tuple[Fault, ...] = ()

    def for_who(self, name: str, incarnation: int = 1, host: int = 0) -> Faults:
        """Return the faults of one host of one incarnation of an island (or of
        `coordinator`, or of one process of a worker)."""
        return Faults(
            tuple(
                fault
                for fault in self.faults
                if (fault.who, fault.incarnation) == (name, incarnation)
                # All hosts hold parts of the parameters.
                and (fault.host == host or fault.factor is not None)
            )
        )

    def factor(self, step: int) -> float | None:
        """Return the factor of the parameters after this step; None if no fault is
        set."""
        found = (f.factor for f in self.faults if f.step == step)
        return next((factor for factor in found if factor is not None), None)

    def slowdown(self, step: int) -> float:
        """Return how many times as long the step after `step` others takes."""
        return self._since(step, "slow", 1.0)

    def starved_s(self, step: int) -> float:
        """Return the seconds by which the batch of that step comes late."""
        return self._since(step, "starve", 0.0)

    def _since(self, step: int, action: str, otherwise: float) -> float:
        found = [f.amount for f in self.faults if f.action == action and f.step <= step]
        return found[-1] if found else otherwise

    def fire(self, step: int, *, prepared: bool = False) -> None:
        """Strike if a fault is set for this step. Call it once per step. prepared: the
        step is a merge that is prepared and not committed."""
        for fault in self.faults:
            if (fault.step, fault.prepared) == (step, prepared):
                fault.strike()


def is_fault(text: str) -> bool:
    """Tell whether the text has the form of a fault."""
    return _PATTERN.fullmatch(text) is not None


def worker_name(number: int) -> str:
    """Return the name of a worker of the coordinator in faults."""
    return f"{_WORKER}{number}"


def parse_faults(
    texts: Iterable[str], islands: Iterable[str], workers: int = 1
) -> Faults:
    """Parse `texts` into faults; raise ConfigError on an unknown form or name. workers:
    of the coordinator; 1: it is one process."""
    merging = [worker_name(number) for number in range(workers if workers > 1 else 0)]
    known = [*islands, COORDINATOR, *merging]
    merging = [COORDINATOR, *merging]
    return Faults(tuple(_parse(text, known, merging) for text in texts))


def _parse(text: str, known: list[str], merging: list[str]) -> Fault:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"placement.faults has {text!r}; the forms are {_FORMS}, "
            f"as in 'v5p-a@40:pause15'"
        )
    who, action = match["who"], match["plain"] or match["action"]
    wrong = ""
    if who not in known:
        wrong = (
            f"there is no {who!r}{suggest(who, known)}; known are {', '.join(known)}"
        )
    elif action in ("nan", "scale") and who in merging:
        wrong = f"{who!r} has no parameters of its own; name an island"
    elif action in ("slow", "starve") and who in merging:
        wrong = f"{who!r} makes no steps; name an island"
    elif action == "kill-prepared" and who not in merging:
        wrong = (
            f"merges are prepared by {COORDINATOR!r} alone; write "
            f"{COORDINATOR}@{match['step']}:kill-prepared"
        )
    if wrong:
        raise ConfigError(f"placement.faults has {text!r}, but {wrong}")
    return Fault(
        text=text,
        who=who,
        incarnation=int(match["incarnation"] or 1),
        step=int(match["step"]),
        action=action,
        amount=float(match["amount"] or 0),
        host=int(match["host"] or 0),
    )
