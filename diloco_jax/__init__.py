"""One model, trained by TPU slices that differ, fail, join and leave.

`emulate(config)` runs a config's whole algorithm in this process, in virtual time.
`LocalCluster(config)` runs it as processes of this machine. `read_history(workdir)` and
`load_params(workdir)` return what such a run did, and what it has learnt.
`join(address, ...)` makes a train loop of your own an island. The names of `__all__`
are the public ones (docs/python.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_jax.cluster.local import LocalCluster, LocalClusterError
    from diloco_jax.config import (
        Config,
        ConfigError,
        DataConfig,
        InnerConfig,
        IslandConfig,
        ModelConfig,
        OuterConfig,
        Placement,
        RunConfig,
        SyncConfig,
    )
    from diloco_jax.config.loading import read_config
    from diloco_jax.evaluation import load_params
    from diloco_jax.island.joined import IslandEndedError, JoinedIsland, join
    from diloco_jax.models.model import loop_model
    from diloco_jax.models.presets import preset
    from diloco_jax.observability.history import History, read_history
    from diloco_jax.simulation.clock import LineSpeed
    from diloco_jax.simulation.emulate import Emulation, emulate
    from diloco_jax.simulation.emulation_options import EmulationOptions
    from diloco_jax.simulation.goodput import GoodputConfig, simulate_goodput

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "Emulation",
    "EmulationOptions",
    "GoodputConfig",
    "History",
    "InnerConfig",
    "IslandConfig",
    "IslandEndedError",
    "JoinedIsland",
    "LineSpeed",
    "LocalCluster",
    "LocalClusterError",
    "ModelConfig",
    "OuterConfig",
    "Placement",
    "RunConfig",
    "SyncConfig",
    "emulate",
    "join",
    "load_params",
    "loop_model",
    "preset",
    "read_config",
    "read_history",
    "simulate_goodput",
]

# Nothing heavy is imported before it is needed: jax reads the environment on import.
_HOMES = {
    "Config": "diloco_jax.config",
    "ConfigError": "diloco_jax.config",
    "DataConfig": "diloco_jax.config",
    "InnerConfig": "diloco_jax.config",
    "IslandConfig": "diloco_jax.config",
    "ModelConfig": "diloco_jax.config",
    "OuterConfig": "diloco_jax.config",
    "Placement": "diloco_jax.config",
    "RunConfig": "diloco_jax.config",
    "SyncConfig": "diloco_jax.config",
    "read_config": "diloco_jax.config.loading",
    "preset": "diloco_jax.models.presets",
    "emulate": "diloco_jax.simulation.emulate",
    "Emulation": "diloco_jax.simulation.emulate",
    "EmulationOptions": "diloco_jax.simulation.emulation_options",
    "LineSpeed": "diloco_jax.simulation.clock",
    "History": "diloco_jax.observability.history",
    "read_history": "diloco_jax.observability.history",
    "LocalCluster": "diloco_jax.cluster.local",
    "LocalClusterError": "diloco_jax.cluster.local",
    "load_params": "diloco_jax.evaluation",
    "join": "diloco_jax.island.joined",
    "JoinedIsland": "diloco_jax.island.joined",
    "IslandEndedError": "diloco_jax.island.joined",
    "loop_model": "diloco_jax.models.model",
    "GoodputConfig": "diloco_jax.simulation.goodput",
    "simulate_goodput": "diloco_jax.simulation.goodput",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
