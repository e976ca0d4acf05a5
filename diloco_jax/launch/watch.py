"""Watch over a launched run: make anew what is taken away, delete the rest at its end.

Nobody sits beside it. So no failing call ends it, or holds up other calls: each is made
again in the next round, and one that fails round after round is told in capitals, and
goes where the run's alerts go.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TypeVar

from diloco_jax.launch.calls import CommandError
from diloco_jax.launch.certificates import Unrenewed
from diloco_jax.launch.resources import Deployment
from diloco_jax.launch.submit import Submitter

EVERY_S = 60.0
"""Pause between two rounds."""
LOUD_ROUNDS = 10
"""Rounds in a row in which a call fails before each as many again are told aloud."""
WARNED_DAYS = 14
"""Days before the end of certificates that cannot be renewed from which that is told
aloud, once a day."""

Answer = TypeVar("Answer")


class LaunchWatch:
    """The rounds of `--action watch`.

    renew: renders the deployment anew, since a slice that is made anew begins above
    all incarnations before it. certify: see `certificates.keep_renewed`. show: prints
    a line. raise_alert: sends an alert to people; it must not block.
    """

    def __init__(
        self,
        submitter: Submitter,
        renew: Callable[[], Deployment],
        certify: Callable[[], Unrenewed | None],
        show: Callable[[str], None],
        raise_alert: Callable[[str], None],
    ) -> None:
        self._submitter, self._renew, self._show = submitter, renew, show
        self._certify, self._raise_alert = certify, raise_alert
        self._certificates_told = 0
        """Day, since 1970, on which certificates that cannot be renewed were told."""
        self._failed: dict[str, tuple[int, float]] = {}
        """By what was tried: rounds in which it failed, and since when."""

    def run(self, until: float) -> None:
        """Go on until the run is confirmed to be over or `until` (of `time.time()`);
        then delete all but the run."""
        submitter = self._submitter
        submitter.prepare()
        while not (submitter.dry_run or time.time() >= until or self._is_over()):
            self._revive()
            time.sleep(EVERY_S)
        if submitter.dry_run:
            self._revive()
        else:
            self._release()

    def _is_over(self) -> bool:
        """Tell whether the run is over, as its coordinator says or said last."""
        phase = self._try("the run's status", self._submitter.phase, "no answer")
        self._show(f"# {time.strftime('%H:%M')} {phase}")
        return phase == "done" or self._try(
            "the coordinator", self._submitter.has_ended, False
        )

    def _revive(self) -> None:
        if not self._submitter.dry_run:
            self._renew_certificates()
        self._try("the launch's files", self._render, None)
        for resource in self._submitter.carried():
            carry = functools.partial(self._submitter.carry, resource)
            self._try(resource.what, carry, None)
        for resource in self._submitter.reviving():
            revive = functools.partial(self._submitter.revive, resource)
            self._try(resource.what, revive, None)

    def _renew_certificates(self) -> None:
        """Renew those that end soon; say once a day why that fails."""
        failed, today = self._certify(), int(time.time() // 86400)
        if failed is None or today == self._certificates_told:
            return
        self._certificates_told = today
        days, why = failed.days, " ".join(failed.why.split())
        remedy = (
            "once they have ended no process is let in again: watch where the folder "
            "of the launch's certificates is, with its ca.key, or renew them there "
            "(`--action create`)"
        )
        if days is None or days > WARNED_DAYS:
            left = "" if days is None else f", which end in {days} days,"
            self._show(f"note: certificates{left} are not renewed: {why}; {remedy}")
            return
        told = (
            f"ALARM: THE LAUNCH'S CERTIFICATES END IN {days} DAYS, and cannot be "
            f"renewed: {why}; {remedy}"
        )
        self._show(told)
        self._raise_alert(told)

    def _render(self) -> None:
        self._submitter.deployment = self._renew()

    def _release(self) -> None:
        """Delete all but the run; go on until nothing of it is left."""
        while True:
            left = False
            for entry in self._submitter.released():
                release = functools.partial(self._submitter.release, entry)
                gone = self._try(str(entry["what"]), release, None)
                if gone is False:
                    return  # The user said no.
                left = left or gone is None
            if not left:
                break
            time.sleep(EVERY_S)
        self._submitter.show_kept()

    def _try(self, what: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return what the call returns, or `otherwise` if it fails, which is told."""
        try:
            answer = call()
        except (CommandError, OSError) as error:
            rounds, since = self._failed.get(what, (0, time.time()))
            self._failed[what] = rounds + 1, since
            self._show(f"error: {error}")
            if (rounds + 1) % LOUD_ROUNDS == 0:
                began = time.strftime("%d %b %H:%M", time.localtime(since))
                why = " ".join(str(error).split())  # An alert is one line.
                told = (
                    f"ALARM: {what.upper()} HAS FAILED FOR {rounds + 1} ROUNDS of "
                    f"`diloco launch --action watch`, since {began}: {why}. Nothing "
                    f"else waits for it, and it is tried again in {EVERY_S:g} s"
                )
                self._show(told)
                self._raise_alert(told)
            return otherwise
        self._failed.pop(what, None)
        return answer
