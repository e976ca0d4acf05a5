"""The process of `diloco coordinator --standby-of`: a standby, then a coordinator."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from diloco_jax import workdir as workdirs
from diloco_jax.config import Config
from diloco_jax.coordinator import main
from diloco_jax.coordinator.serving import serve
from diloco_jax.coordinator.settings import own_tls
from diloco_jax.coordinator.standby.node import StandbyNode
from diloco_jax.coordinator.standby.seat import LED_ELSEWHERE
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.wire import addresses
from diloco_jax.wire.errors import Refused

logger = logging.getLogger(__name__)


def run_standby(config: Config, workdir: Path, primary: str) -> int:
    """Follow the coordinator at HOST:PORT, take over when it is gone, and serve the run
    until it is over; return the exit code.

    A node that took over may lose the mandate again, as while it loads its state. That
    is no refusal for good, as for a primary: the same command follows whoever leads.

    Raises ConfigError and Refused as `StandbyNode.run` and `main.run` do.
    """
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    workdirs.make_workdir(workdir)
    placement = config.placement
    tls = own_tls(placement)
    addresses.require_tls(
        placement.bind, tls=tls is not None, insecure=placement.insecure
    )
    outcome = StandbyNode(config, workdir, primary, tls).run()
    if not outcome.by:
        return EXIT_DONE
    coordinator = main.Coordinator(config, workdir, init=False)
    coordinator.gathers = outcome.run_id if outcome.by == "gathering" else ""
    try:
        return serve(coordinator)
    except Refused as error:
        if error.code != LED_ELSEWHERE:
            raise
        logger.error("%s: start it again as it is, with --standby-of", error)
        return EXIT_FAILED
