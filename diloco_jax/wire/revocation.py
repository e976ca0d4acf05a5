"""Ask the coordinator whether a certificate is revoked: its folder alone has the list,
and an island that offers its anchors serves certificates of others.

Nothing is served on no answer. That costs a join nothing, since it needs the
coordinator anyway, for the digests of what it fetches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from diloco_jax.wire.errors import Refused, WireError
from diloco_jax.wire.peers import MOST_KNOWN, revoked
from diloco_jax.wire.principal import Principal

KEPT_S = 5.0
"""Seconds for which an answer counts: a fetch has many stripes."""


class Revocations:
    """The coordinator's answers about certificates. Any thread may ask."""

    def __init__(self, ask: Callable[[int], bool]) -> None:
        """ask: asks the coordinator for a serial number; raises WireError."""
        self._ask, self._lock = ask, threading.Lock()
        self._known: dict[int, tuple[float, Future[bool]]] = {}
        """When the coordinator was asked for a serial number, and its answer."""

    def require_valid(self, serial: int, who: Principal) -> None:
        """Raise Refused if a certificate is revoked, or the coordinator does not
        say."""
        try:
            found = self._answer(serial)
        except WireError as error:
            raise Refused(
                "unchecked",
                f"the coordinator does not say whether the certificate of {who} is "
                f"revoked ({error}), and this island serves nobody unchecked; "
                f"fetch from the coordinator",
            ) from error
        if found:
            raise revoked(who, serial)

    def _answer(self, serial: int) -> bool:
        """Ask for a serial number, or wait for the answer to another thread: many
        stripes of one fetch come at once."""
        now = time.monotonic()
        with self._lock:
            at, answer = self._known.get(serial, (float("-inf"), Future[bool]()))
            if asks := now >= at + KEPT_S:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                answer = Future()
                self._known[serial] = now, answer
        if asks:
            try:
                answer.set_result(self._ask(serial))
            except BaseException as error:
                with self._lock:  # No answer does not count: the next one asks.
                    if self._known.get(serial) == (now, answer):
                        del self._known[serial]
                answer.set_exception(error)
        return answer.result()
