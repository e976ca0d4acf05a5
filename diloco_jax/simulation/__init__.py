"""Virtual time: the production policy, driven by an event queue."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_jax.simulation.bandwidth import BandwidthConfig, simulate_bandwidth
    from diloco_jax.simulation.failures import FailureModel
    from diloco_jax.simulation.fleet import Exchange
    from diloco_jax.simulation.goodput import GoodputConfig, simulate_goodput
    from diloco_jax.simulation.mix import MixConfig, simulate_mix
    from diloco_jax.simulation.scavenge import ScavengeConfig, simulate_scavenge
    from diloco_jax.simulation.sweep import sweep_goodput

__all__ = [
    "BandwidthConfig",
    "Exchange",
    "FailureModel",
    "GoodputConfig",
    "MixConfig",
    "ScavengeConfig",
    "simulate_bandwidth",
    "simulate_goodput",
    "simulate_mix",
    "simulate_scavenge",
    "sweep_goodput",
]

# Nothing heavy is imported before it is needed: jax looks at the environment then.
_HOMES = {
    "BandwidthConfig": "bandwidth",
    "Exchange": "fleet",
    "FailureModel": "failures",
    "GoodputConfig": "goodput",
    "MixConfig": "mix",
    "ScavengeConfig": "scavenge",
    "simulate_bandwidth": "bandwidth",
    "simulate_goodput": "goodput",
    "simulate_mix": "mix",
    "simulate_scavenge": "scavenge",
    "sweep_goodput": "sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
