"""The shortest time of a sequence on an island by published peak rates, and by what the
config says.

The coordinator believes no island that says it is much faster.
"""

from __future__ import annotations

from diloco_jax.config import Config, IslandConfig
from diloco_jax.hardware.tpus import chip_of, find_slice

ANY_DEVICE_FLOPS_PER_S = 1e16
"""Rate that no device of the islands without a topology is above: twice the peak of the
fastest chips of 2026."""
UNDESCRIBED_DEVICES = 1024
"""Devices, as fast as that, of an island that the config does not describe."""
UNDESCRIBED = ""
"""The key of such islands."""


def least_seconds(config: Config, sequence: float) -> dict[str, float]:
    """Return the least seconds of a sequence by island; 0 if nothing is known.
    sequence: its least FLOPs; 0 if they are not known."""
    described = {
        name: max(
            sequence / _flops_per_s(name, island),
            island.step_seconds / island.batch_size,
        )
        for name, island in config.islands.items()
    }
    others = sequence / (UNDESCRIBED_DEVICES * ANY_DEVICE_FLOPS_PER_S)
    return {**described, UNDESCRIBED: others}


def _flops_per_s(name: str, island: IslandConfig) -> float:
    if not island.topology:
        return island.devices * ANY_DEVICE_FLOPS_PER_S
    found = find_slice(island.topology, f"islands.{name}.topology")
    return max(found.chips, island.devices) * chip_of(found).flops_per_s
