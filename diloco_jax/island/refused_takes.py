"""Tell people about takes that were not merged."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from diloco_jax.protocol.island.boundary import RefusedTake

logger = logging.getLogger(__name__)


def log_refused(takes: Iterable[RefusedTake]) -> None:
    """Log each take with its reason, and what became of its steps."""
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
