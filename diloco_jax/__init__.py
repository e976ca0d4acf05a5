"""One model, trained by TPU slices that differ, fail, join and leave.

`emulate(config)` runs a config's whole algorithm in this process, in virtual time.
`LocalCluster(config)` runs it as processes of this machine. `load_params(workdir)`
returns the parameters that a run has learnt. `join(address, ...)` makes a train loop of
your own an island.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_jax.cluster.local import LocalCluster
    from diloco_jax.evaluation import load_params
    from diloco_jax.island.joined import IslandEndedError, JoinedIsland, join
    from diloco_jax.models.model import loop_model
    from diloco_jax.simulation.emulation.emulate import Emulation, emulate
    from diloco_jax.simulation.emulation.history import History
    from diloco_jax.simulation.emulation.options import EmulationOptions

__all__ = [
    "Emulation",
    "EmulationOptions",
    "History",
    "IslandEndedError",
    "JoinedIsland",
    "LocalCluster",
    "emulate",
    "join",
    "load_params",
    "loop_model",
]

# Nothing heavy is imported before it is needed: jax reads the environment on import.
_HOMES = {
    "Emulation": "diloco_jax.simulation.emulation.emulate",
    "emulate": "diloco_jax.simulation.emulation.emulate",
    "EmulationOptions": "diloco_jax.simulation.emulation.options",
    "History": "diloco_jax.simulation.emulation.history",
    "LocalCluster": "diloco_jax.cluster.local",
    "load_params": "diloco_jax.evaluation",
    "join": "diloco_jax.island.joined",
    "JoinedIsland": "diloco_jax.island.joined",
    "IslandEndedError": "diloco_jax.island.joined",
    "loop_model": "diloco_jax.models.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
