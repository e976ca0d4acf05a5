"""The notice that this machine will be taken away, and the use of its seconds.

The notice comes as SIGTERM, or as a value of the cloud's metadata server. The loop then
makes no more steps, and the coordinator asks for everything that is open, whatever tick
is due. Once it has that, or after `placement.notice_s`, the island says goodbye: a
delta that has arrived is merged without the island, one that is on its way is lost.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.parse
from collections.abc import Callable

from diloco_jax.errors import EXIT_FAILED
from diloco_jax.island.hosts import world
from diloco_jax.island.mailbox import Mailbox

logger = logging.getLogger(__name__)

LONG_POLL_S = 60
"""Seconds after which the metadata server answers at the latest, changed or not."""
AWAY_S = 5.0
"""Seconds between questions to a server that is away."""


class Preemption:
    """Handle the notice that this machine will be taken away: `watch` waits for it,
    `notice` acts on it.

    Args:
      notice_s: seconds from the notice until the goodbye must be said; 0 = this machine
        is not taken away, and `watch` does nothing.
      tell_leader: on a host that follows host 0: tells host 0, which decides.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        notice_s: float,
        tell_leader: Callable[[str], None] | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._tell_leader = tell_leader
        self._notice_s = notice_s
        self._noticed = threading.Lock()

    @property
    def expected(self) -> bool:
        """True if SIGTERM is a notice."""
        return self._notice_s > 0

    def notice(self, source: str) -> None:
        """End the loop once the open takes have been sent.

        Do not call it from a signal handler: the mailbox has a lock. The process exits
        with the code of a failure, so that its supervisor starts the island again.
        """
        if self._tell_leader is not None:
            self._tell_leader(source)
            return
        if not self._noticed.acquire(blocking=False):
            return  # Two sources tell of one notice.
        logger.warning("notice by %s: this island leaves", source)
        thread = threading.Thread(
            target=self._leave, args=(source,), name="leaving", daemon=True
        )
        thread.start()

    def watch(self, host: str = "") -> threading.Thread | None:
        """Start waiting for the metadata server's notice, beside the loop.

        host: HOST or HOST:PORT of the server; empty = GCE_METADATA_HOST, or the usual
        one. Where none answers, the thread ends and nothing else happens.
        """
        if not self.expected:
            return None
        thread = threading.Thread(
            target=self._watch, args=(host,), name="preemption", daemon=True
        )
        thread.start()
        return thread

    def _leave(self, source: str) -> None:
        if self._mailbox.status().phase in ("training", "stopped"):
            began = time.monotonic()
            self._mailbox.leave()
            sent = self._mailbox.wait_to_leave(self._notice_s)
            logger.info(
                "%s of what was open has arrived after %.1f s",
                "all" if sent else "not all",
                time.monotonic() - began,
            )
        self._mailbox.end(EXIT_FAILED, f"preempted ({source})", "preempted")

    def _watch(self, host: str) -> None:
        tag, known = "", False
        while True:
            try:
                value, tag = _ask(host, tag)
            except (OSError, ValueError) as error:
                if not known:
                    logger.debug("no metadata server: %s", error)
                    return
                # The server is away for moments now and then.
                time.sleep(AWAY_S)
                continue
            known = True
            if value.strip().upper() == "TRUE":
                self.notice("the metadata server")
                return


def _ask(host: str, tag: str) -> tuple[str, str]:
    """Return the value of `instance/preempted` and its tag. With a tag, the answer
    comes when the value is no longer that one, or after LONG_POLL_S."""
    if not tag:
        return world.ask_metadata("preempted", host)
    query = {"wait_for_change": "true", "last_etag": tag, "timeout_sec": LONG_POLL_S}
    path = f"preempted?{urllib.parse.urlencode(query)}"
    return world.ask_metadata(path, host, LONG_POLL_S)
