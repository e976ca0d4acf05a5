"""`diloco worker CONFIG --index N --workdir DIR`: a worker on another machine."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from diloco_jax.config import Config
from diloco_jax.coordinator.workers.outpost.outpost import Outpost
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED

logger = logging.getLogger(__name__)


def run(config: Config, index: int, workdir: Path, bind: str) -> int:
    """Serve as this worker until the run is over, or no coordinator comes; return the
    exit code."""
    outpost = Outpost(config, index, workdir, bind)
    with contextlib.closing(outpost):
        logger.info("worker %d awaits the coordinator at %s", index, outpost.address)
        if outpost.serve():
            logger.info("the run is over")
            return EXIT_DONE
        logger.error(
            "no coordinator came for %g s: this worker ends, and what it has stays in "
            "%s; start it again with the coordinator",
            outpost.patience.within_s,
            workdir,
        )
        return EXIT_FAILED
