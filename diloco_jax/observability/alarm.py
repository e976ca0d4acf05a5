"""Alerts go to where people are: to a command's standard input, or to a URL.

A thread of its own looks at the alerts once a second and sends those that are new, in
one message, at most once in `EVERY_S`. So nothing that it waits for holds up a
decision, and a storm of alerts is a few messages. An alert that is raised again while
it stands is sent again, `FORGOTTEN_S` after it was last sent or later.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import re
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_jax.config import Placement

logger = logging.getLogger(__name__)

LOOK_S = 1.0
EVERY_S = 60.0
"""Least seconds between two messages."""
FORGOTTEN_S = 600.0
"""Seconds without an alert after which the same alert is new again."""
TOGETHER = 20
"""Alerts of one message; it counts those beyond."""
REMEMBERED = 1000
"""Alerts that are known to be old."""
WITHIN_S = 30.0
"""Longest time for one message to be delivered."""
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclasses.dataclass(kw_only=True)
class _Known:
    """An alert that was there; times are those of the alarm's clock."""

    seen: float
    taken_up: float
    again: str = ""
    """Its text if it was raised again, too soon for another message."""


class Alarm:
    """Delivers a run's alerts. Make it, `start`, and `close` at the end."""

    def __init__(
        self,
        placement: Placement,
        run_id: str,
        alerts: Callable[[], Sequence[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """alerts: returns those that there are now; called on the alarm's thread."""
        self._command, self._url = placement.alert_command, placement.alert_url
        self._run_id, self._alerts, self._clock = run_id, alerts, clock
        self._known: dict[str, _Known] = {}
        """Alerts by their texts without numbers; those seen last stand last."""
        self._raised: collections.deque[str] = collections.deque(maxlen=REMEMBERED)
        """Alerts that were raised since the last look."""
        self._waiting: list[str] = []
        self._beyond = 0
        """New alerts for which the message has no room."""
        self._due = -EVERY_S
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alarm", daemon=True)

    def start(self) -> None:
        """Start the thread, if alerts are to go anywhere."""
        if self._command or self._url:
            self._thread.start()

    def close(self, within_s: float) -> None:
        """Deliver what waits; end the thread within this time."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def raised(self, text: str) -> None:
        """Note that an alert was raised, maybe once more while it still stands. To be
        called before it is among the alerts; any thread may call it."""
        self._raised.append(text)

    def look(self) -> None:
        """Take up what is new, and deliver it if it is time for a message."""
        now = self._clock()
        for _ in range(len(self._raised)):
            self._see(self._raised.popleft(), now, raised=True)
        for text in self._alerts():
            self._see(text, now)
        for known in self._known.values():
            if known.again and now - known.taken_up >= FORGOTTEN_S:
                self._take_up(known.again, now, known)
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        if self._waiting and (now >= self._due + EVERY_S or self._ending.is_set()):
            self._due = now
            waiting, beyond = self._waiting, self._beyond
            self._waiting, self._beyond = [], 0
            self._deliver(waiting, beyond)

    def _see(self, text: str, now: float, *, raised: bool = False) -> None:
        """Note that an alert is there; take it up if it is new."""
        key = NUMBER.sub("#", text)
        known = self._known.pop(key, None)
        if known is None or now - known.seen >= FORGOTTEN_S:
            known = _Known(seen=now, taken_up=now)
            self._take_up(text, now, known)
        elif raised:
            known.again = text
        known.seen = now
        self._known[key] = known

    def _take_up(self, text: str, now: float, known: _Known) -> None:
        known.taken_up, known.again = now, ""
        if len(self._waiting) < TOGETHER:
            self._waiting.append(text)
        else:
            self._beyond += 1

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ending.wait(LOOK_S)
            try:
                self.look()
            except Exception:
                logger.exception("alerts could not be delivered")

    def _deliver(self, alerts: list[str], beyond: int) -> None:
        message = {"run_id": self._run_id, "alerts": alerts, "more": beyond}
        ways = {self._command: self._to_command, self._url: self._to_url}
        for where, send in ways.items():
            try:
                if where:
                    send(message)
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                logger.error(
                    "%d alerts did not reach %s: %s", len(alerts), where, error
                )

    def _to_command(self, message: Mapping[str, Any]) -> None:
        """Give the command one line for each alert."""
        lines = [f"run {message['run_id']}", *message["alerts"]]
        if message["more"]:
            lines.append(f"and {message['more']} more: see diloco status")
        subprocess.run(
            shlex.split(self._command),
            input="\n".join(lines) + "\n",
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=WITHIN_S,
            check=True,
        )

    def _to_url(self, message: Mapping[str, Any]) -> None:
        request = urllib.request.Request(
            self._url,
            json.dumps({"text": "\n".join(message["alerts"]), **message}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            answer.read(1024)
