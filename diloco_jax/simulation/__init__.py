"""Virtual time: the production protocol, driven by an event queue."""

from __future__ import annotations

import importlib
from typing import Any

# Nothing heavy is imported before it is needed: jax reads the environment when it is
# imported.
_HOMES = {
    "BandwidthConfig": "fleets.bandwidth",
    "ExchangeTerms": "fleets.fleet",
    "FailureModel": "fleets.failures",
    "GoodputConfig": "fleets.goodput",
    "MixConfig": "fleets.unequal",
    "ScavengeConfig": "fleets.unequal",
    "simulate_bandwidth": "fleets.bandwidth",
    "simulate_goodput": "fleets.goodput",
    "simulate_mix": "fleets.unequal",
    "simulate_scavenge": "fleets.unequal",
    "sweep_goodput": "fleets.goodput",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
