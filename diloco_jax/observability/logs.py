"""One format for the logs of all processes, and lines that several of them write."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable

from diloco_jax.protocol.island.boundary import RefusedTake

logger = logging.getLogger(__name__)


def setup_logging(level: str = "INFO") -> None:
    """Send the package's log to standard error, times in UTC; others' from WARNING on.

    Calling it again replaces what it did before.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("diloco_jax").setLevel(level)


def log_refused(takes: Iterable[RefusedTake]) -> None:
    """Log each refused take, with the reason and the outcome for its steps."""
    for take in takes:
        # A take without steps is no news: the island was asked twice within a step.
        logger.log(
            logging.DEBUG if take.reason == "empty" else logging.WARNING,
            "take of fragment %d at tick %d was refused (%s): its steps are %s",
            take.fragment,
            take.tick,
            take.reason,
            "open again" if take.outcome == "reopened" else "lost",
        )
