"""The environment of an island's process; imports no jax itself."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from diloco_jax import before_jax
from diloco_jax.before_jax import prepare_environment
from diloco_jax.config import IslandConfig
from diloco_jax.hardware.tpus import generation_here


def prepare_island(
    island: IslandConfig,
    environment: MutableMapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> None:
    """Make the process one host of the island; call before importing jax.

    libtpu's flags are those of the island's topology, or else of this machine's TPUs.
    """
    prepare_environment(island.devices // island.hosts, environment)
    generation = before_jax.generation_of(island.topology) or generation_here(root)
    before_jax.set_libtpu_flags(generation, environment)
