"""Ask the coordinator whether a certificate is revoked: its folder alone has the list,
and an island that offers its anchors serves certificates of others.

Nothing is served on no answer. That costs a join nothing, since it needs the
coordinator anyway, for the digests of what it fetches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
        self._known: dict[int, tuple[float, bool]] = {}
        """When the coordinator was asked for a serial number, and its answer."""

    def require_valid(self, serial: int, who: Principal) -> None:
        """Raise SecurityError if a certificate is revoked, and Refused if the
        coordinator does not say."""
        now = time.monotonic()
        with self._lock:
            at, found = self._known.get(serial, (float("-inf"), False))
        if now >= at + KEPT_S:
            try:
                found = self._ask(serial)
            except WireError as error:
                raise Refused(
                    "unchecked",
                    f"the coordinator does not say whether the certificate of {who} is "
                    f"revoked ({error}), and this island serves nobody unchecked; "
                    f"fetch from the coordinator",
                ) from error
            with self._lock:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[serial] = now, found
        if found:
            raise revoked(who, serial)
