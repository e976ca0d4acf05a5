"""Prepare an island's process, and meet its other hosts, before it has any part."""

from __future__ import annotations

import logging
import os

from diloco_jax import before_jax
from diloco_jax.config import Config
from diloco_jax.hardware.tpus import generation_here
from diloco_jax.island.environment import prepare_island
from diloco_jax.island.hosts.world import Hosts, WorldAddress, join_world

logger = logging.getLogger(__name__)


def meet(config: Config, name: str, where: WorldAddress) -> Hosts | None:
    """Return the hosts of the island, once all have come; None if it has one. Raises
    ConfigError or HostsError."""
    island = config.island(name)
    prepare_island(island)
    if before_jax.LIBTPU_VARIABLE in os.environ:
        # libtpu ends a process whose flags it does not know: the log says which they
        # were.
        logger.info(
            "island %s compiles with %s",
            name,
            before_jax.libtpu_flags_in_force(os.environ),
        )
        generation = before_jax.generation_of(island.topology) or generation_here()
        version = before_jax.libtpu_version()
        for clash in before_jax.flag_clashes(
            os.environ[before_jax.LIBTPU_VARIABLE],
            before_jax.libtpu_flags(generation, version),
            f"{generation}, libtpu {version}",
        ):
            logger.warning("island %s: %s", name, clash)
    if island.hosts == 1:
        return None
    placement = config.placement
    return join_world(
        where,
        island.hosts,
        budget_s=placement.time_budget_s,
        meet_s=placement.hosts_budget_s,
    )
