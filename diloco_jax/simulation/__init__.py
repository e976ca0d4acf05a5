"""Virtual time: the production protocol, driven by an event queue."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco_jax.simulation.fleets.bandwidth import (
        BandwidthConfig,
        simulate_bandwidth,
    )
    from diloco_jax.simulation.fleets.failures import FailureModel
    from diloco_jax.simulation.fleets.fleet import ExchangeTerms
    from diloco_jax.simulation.fleets.goodput import GoodputConfig, simulate_goodput
    from diloco_jax.simulation.fleets.mix import MixConfig, simulate_mix
    from diloco_jax.simulation.fleets.scavenge import ScavengeConfig, simulate_scavenge
    from diloco_jax.simulation.fleets.sweep import sweep_goodput

__all__ = [
    "BandwidthConfig",
    "ExchangeTerms",
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

# Nothing heavy is imported before it is needed: jax reads the environment when it is
# imported.
_HOMES = {
    "BandwidthConfig": "fleets.bandwidth",
    "ExchangeTerms": "fleets.fleet",
    "FailureModel": "fleets.failures",
    "GoodputConfig": "fleets.goodput",
    "MixConfig": "fleets.mix",
    "ScavengeConfig": "fleets.scavenge",
    "simulate_bandwidth": "fleets.bandwidth",
    "simulate_goodput": "fleets.goodput",
    "simulate_mix": "fleets.mix",
    "simulate_scavenge": "fleets.scavenge",
    "sweep_goodput": "fleets.sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
