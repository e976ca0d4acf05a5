"""The options of `diloco island`, and its process's environment; imports no jax."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import MutableMapping
from pathlib import Path

from diloco_jax import before_jax
from diloco_jax.before_jax import prepare_environment
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.config.fields import setting
from diloco_jax.hardware.tpus import generation_here
from diloco_jax.wire.addresses import parse_address


@dataclasses.dataclass(frozen=True)
class IslandOptions:
    """The options of `diloco island`."""

    name: str = setting("", help="The island's name in the config.")
    coordinator: str = setting("", help="HOST:PORT of the coordinator.")
    incarnation: int = setting(
        0,
        help="Number of this attempt, higher than any before; 0 = counted in WORKDIR.",
    )
    world: str = setting(
        "",
        help="HOST:PORT where the island's hosts meet; empty = found by jax (TPU "
        "slices).",
    )
    host_index: int = setting(0, help="Which host of the island this is, with --world.")
    cache: str = setting(
        "",
        help="Folder, or gs://BUCKET/FOLDER, of compiled programs that the islands of "
        "one owner share: each runs what any of them put there. Empty = one for this "
        "island, beside its checkpoints or in WORKDIR.",
    )

    def check(self, config: Config) -> None:
        """Raise ConfigError, naming the option, for values that the config rules
        out.
        """
        for field in ("name", "coordinator"):
            if not getattr(self, field):
                raise ConfigError(f"--{field} is missing; see diloco island --help")
        parse_address(self.coordinator, "--coordinator")
        if self.incarnation < 0:
            raise ConfigError(
                f"--incarnation {self.incarnation}: attempts are counted from 1; leave "
                f"it out to have them counted in WORKDIR"
            )
        hosts = config.island(self.name).hosts
        if not 0 <= self.host_index < hosts:
            raise ConfigError(
                f"--host-index {self.host_index}, but island {self.name!r} has hosts = "
                f"{hosts}; give each of them one from 0 to {hosts - 1}"
            )
        if self.world and hosts == 1:
            raise ConfigError(
                f"--world {self.world}, but island {self.name!r} has hosts = 1; leave "
                f"it out, or set islands.{self.name}.hosts"
            )
        if self.world:
            parse_address(self.world, "--world")


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
