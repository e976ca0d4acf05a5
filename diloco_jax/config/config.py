"""A run, its islands and their placement, in one value."""

from __future__ import annotations

import dataclasses
from typing import Any

from diloco_jax.config.island import IslandConfig
from diloco_jax.config.launch import LaunchConfig
from diloco_jax.config.placement import Placement
from diloco_jax.config.replacing import replaced
from diloco_jax.config.run import RunConfig
from diloco_jax.config.validation import validate
from diloco_jax.errors import ConfigError, suggest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run, its islands by name, and their placement.

    Example:
      >>> from diloco_jax import Config, IslandConfig
      >>> config = Config(
      ...     islands={"v5p": IslandConfig(batch_size=4), "v6e": IslandConfig()}
      ... )
      >>> quick = config.replace("total_tokens", 50_000).validate()
      >>> round(quick.merges_per_fragment(), 2)
      1.36
    """

    run: RunConfig = RunConfig()
    islands: dict[str, IslandConfig] = dataclasses.field(
        default_factory=lambda: {"a": IslandConfig()}
    )
    placement: Placement = Placement()
    launch: LaunchConfig = dataclasses.field(default_factory=LaunchConfig)

    def validate(self) -> Config:
        """Return self; raise ConfigError naming field, values and remedy."""
        validate(self)
        return self

    def replace(self, name: str, value: Any) -> Config:
        """Return a copy with one field changed, for variations of a config.

        Example:
          >>> from diloco_jax import Config
          >>> config = Config().replace("sync.grace", 0).replace("total_tokens", 5000)
          >>> config.replace("islands.a.batch_size", 4).islands["a"].batch_size
          4

        Args:
          name: of the field, dotted, as an option of the command line has it
            ("sync.grace", "islands.NAME.batch_size"); "run." and "placement." may
            stand in front.
          value: its new value, whose type and bounds are checked. Rules between fields
            are checked where the config is used, so that fields may be changed one
            after the other.

        Raises:
          ConfigError: there is no such field, or the value is not one for it.
        """
        changed: Config = replaced(self, name, value)
        return changed

    def island(self, name: str) -> IslandConfig:
        """Return an island's config; ConfigError with the nearest name if there is
        none."""
        if name not in self.islands:
            raise ConfigError(
                f"no island {name!r} in this config{suggest(name, self.islands)}; "
                f"it has {', '.join(self.islands)}"
            )
        return self.islands[name]

    def merges_per_fragment(self) -> float:
        """Return the merges each fragment will see if all islands are equally fast."""
        per_step = sum(i.batch_size for i in self.islands.values())
        steps = self.run.total_tokens / (per_step * self.run.sequence_length)
        return steps / self.run.sync.steps_per_cycle
