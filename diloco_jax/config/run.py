"""The settings that all islands of a run must agree on."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.data import DataConfig
from diloco_jax.config.fields import AT_LEAST_1, Bound, setting
from diloco_jax.config.fingerprint import fingerprint
from diloco_jax.config.inner import InnerConfig
from diloco_jax.config.model import ModelConfig
from diloco_jax.config.outer import OuterConfig
from diloco_jax.config.sync import SyncConfig

SEED = Bound(0, 2**32 - 1)
"""Range of a seed: the bits of it that keys of jax.random use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that all islands must agree on.

    Example:
      >>> from diloco_jax import RunConfig, SyncConfig
      >>> a, b = RunConfig(), RunConfig(sync=SyncConfig(quorum=2))
      >>> a.fingerprint() == b.fingerprint()  # so no island of the one joins the other
      False
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()
    sequence_length: int = setting(
        128, AT_LEAST_1, help="Tokens of one training sequence."
    )
    total_tokens: int = setting(
        1_000_000,
        AT_LEAST_1,
        help="Tokens that all islands train on together, after which the run ends.",
    )
    seed: int = setting(
        0, SEED, help="Seed of the first parameters and of the order of the data."
    )

    def fingerprint(self) -> str:
        """Return 16 hex digits over every field that is not local to a machine."""
        return fingerprint(self)
