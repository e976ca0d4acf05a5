"""Keep the log short, whatever peers do: each has a few lines about its failed calls.

A refused call costs its peer nothing and may come a thousand times a second. The number
of lines that were left out stands in the next one.
"""

from __future__ import annotations

import logging
import threading
import time

from diloco_jax.wire.principal import Principal

AT_ONCE = 20
"""Lines about one peer in a row."""
EVERY_S = 60.0
"""Seconds in which a peer earns another one."""
MOST_KNOWN = 1000
"""Peers whose lines are counted; beyond these, the one longest without a line is
forgotten."""
MOST_CHARS = 1000
"""Characters of one line."""


class FewLines:
    """The lines of one server, by peer. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Principal | str | None, tuple[float, float, int]] = {}
        """Lines left, when, and how many were left out since the last one. Peers
        without a certificate share theirs."""

    def log(
        self,
        logger: logging.Logger,
        level: int,
        who: Principal | str | None,
        text: str,
        *,
        trace: bool = False,
    ) -> None:
        """Log a line about `who`, a peer or in words several, or count it. trace: with
        the error at hand."""
        if not logger.isEnabledFor(level):
            return
        out = self._left_out(who)
        if out is None:
            return
        more = f"; {out} more lines about {_name(who)} were left out" if out else ""
        logger.log(level, "%s%s", text[:MOST_CHARS], more, exc_info=trace)

    def _left_out(self, who: Principal | str | None) -> int | None:
        """Count a line; return how many were left out before it, None if it is one of
        them."""
        now = time.monotonic()
        with self._lock:
            left, at, out = self._known.pop(who, (float(AT_ONCE), now, 0))
            left = min(left + (now - at) / EVERY_S, AT_ONCE)
            written = left >= 1
            self._known[who] = (
                (left - 1, now, 0) if written else (left, now, out + 1)
            )  # The newest one stands last.
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
            return out if written else None


def _name(who: Principal | str | None) -> str:
    return "peers without a certificate" if who is None else str(who)
