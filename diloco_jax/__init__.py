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
    from diloco_jax.cluster.cluster import LocalCluster, LocalClusterError
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
    from diloco_jax.observability.history import History, plot_losses, read_history
    from diloco_jax.simulation.clock import LineSpeed
    from diloco_jax.simulation.emulate import Emulation, emulate
    from diloco_jax.simulation.emulation_options import EmulationOptions
    from diloco_jax.simulation.goodput import GoodputConfig, simulate_goodput
    from diloco_jax.simulation.sweep import Sweep, sweep

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
    "Sweep",
    "SyncConfig",
    "emulate",
    "join",
    "load_params",
    "loop_model",
    "plot_losses",
    "preset",
    "read_config",
    "read_history",
    "simulate_goodput",
    "sweep",
]

# Nothing heavy is imported before it is needed: jax reads the environment on import.
_PUBLIC = {
    "config": "Config ConfigError DataConfig InnerConfig IslandConfig ModelConfig "
    "OuterConfig Placement RunConfig SyncConfig",
    "config.loading": "read_config",
    "models.presets": "preset",
    "models.model": "loop_model",
    "simulation.emulate": "Emulation emulate",
    "simulation.emulation_options": "EmulationOptions",
    "simulation.clock": "LineSpeed",
    "simulation.goodput": "GoodputConfig simulate_goodput",
    "observability.history": "History plot_losses read_history",
    "simulation.sweep": "Sweep sweep",
    "cluster.cluster": "LocalCluster LocalClusterError",
    "evaluation": "load_params",
    "island.joined": "IslandEndedError JoinedIsland join",
}
_HOMES = {
    name: f"{__name__}.{module}"
    for module, names in _PUBLIC.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
