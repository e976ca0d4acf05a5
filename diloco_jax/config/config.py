"""A run, its islands and their placement, in one value."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.island import IslandConfig
from diloco_jax.config.launch import LaunchConfig
from diloco_jax.config.placement import Placement
from diloco_jax.config.run import RunConfig
from diloco_jax.config.validation import validate
from diloco_jax.errors import ConfigError, suggest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run, its islands by name, and their placement."""

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
