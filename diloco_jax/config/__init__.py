"""The config of a run, as frozen values.

All islands must agree on the `RunConfig`, which has one fingerprint. Each island
announces its `IslandConfig` at join. `Placement` says where processes run, how long
they wait and which faults to inject; it is in no fingerprint, and a run may go on with
another one. A `configs/*.py` file defines a function `config()` that returns a
`Config`.

Bounds and help stand on the field (`fields.setting`), rules between fields in
`config`, and choices for open fields in `resolving`.
"""

from diloco_jax.config.config import Config
from diloco_jax.config.fields import own_code
from diloco_jax.config.placement import (
    AnchorMemory,
    IslandConfig,
    LaunchConfig,
    Placement,
)
from diloco_jax.config.run import (
    DataConfig,
    FragmentBy,
    GraceWindow,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    VisionConfig,
    differences,
    shared_fields,
)
from diloco_jax.errors import ConfigError, suggest

__all__ = [
    "AnchorMemory",
    "Config",
    "ConfigError",
    "DataConfig",
    "FragmentBy",
    "GraceWindow",
    "InnerConfig",
    "IslandConfig",
    "LaunchConfig",
    "ModelConfig",
    "OuterConfig",
    "Placement",
    "RunConfig",
    "SyncConfig",
    "VisionConfig",
    "differences",
    "own_code",
    "shared_fields",
    "suggest",
]
