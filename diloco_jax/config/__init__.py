"""What a run is, as frozen values.

`RunConfig` is what all islands must agree on: it has one fingerprint. `IslandConfig`
is announced by each island at join. `Placement` says where processes live and what
goes wrong on purpose; it concerns nobody but this machine. A `configs/*.py` file is a
function `config()` that returns a `Config`.

Bounds and help stand on the field (`fields.setting`); `validation` holds the rules
between fields, `presets` what is chosen where a config leaves it open.
"""

from diloco_jax.config.config import Config
from diloco_jax.config.data import DataConfig
from diloco_jax.config.fingerprint import differences, shared_fields
from diloco_jax.config.inner import InnerConfig
from diloco_jax.config.island import AnchorMemory, IslandConfig
from diloco_jax.config.launch import LaunchConfig
from diloco_jax.config.model import ModelConfig
from diloco_jax.config.outer import OuterConfig
from diloco_jax.config.placement import Placement
from diloco_jax.config.run import RunConfig
from diloco_jax.config.sync import GraceWindow, PartialMerges, SyncConfig
from diloco_jax.errors import ConfigError, suggest

__all__ = [
    "AnchorMemory",
    "Config",
    "ConfigError",
    "DataConfig",
    "GraceWindow",
    "InnerConfig",
    "IslandConfig",
    "LaunchConfig",
    "ModelConfig",
    "OuterConfig",
    "PartialMerges",
    "Placement",
    "RunConfig",
    "SyncConfig",
    "differences",
    "shared_fields",
    "suggest",
]
