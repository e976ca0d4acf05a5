"""The time that a restart of the coordinator takes, and how long islands last.

Islands train on without the coordinator, so the data that they hold, and every wait for
it, must last through its restart. The processes of a run know the model and the disk;
`diloco plan` knows the length of a cycle, too, and refuses a run whose islands do not
last.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.config import Config
from diloco_jax.hardware.machines import (
    CONSTANTS,
    MACHINES,
    disk_bytes_per_s,
    machine_of,
    rate_of,
)

STATE_BYTES = 12
"""Bytes per parameter of the state: parameters, anchor and momentum in f32."""
REPLAYED_CYCLES = 6
"""Cycles whose publishes a restart is taken to replay where no plan has counted them.
12 B parameters on a disk of 2 TB: a round of snapshots takes 800 s, cycles of 93 s, and
a fragment's newest snapshot is half a round old on average."""
SOME_MACHINE = "n2-highmem-16"
"""Machine whose disk is taken where the table lacks the config's."""


def state_seconds(
    read_bytes: float,
    bytes_per_s: float,
    replayed_parameters: float,
    replay_core_seconds: float,
) -> float:
    """Return the seconds in which a starting process restores its state.

    Args:
      read_bytes: of the newest snapshots and the publishes after them, each read once.
      bytes_per_s: of the disk.
      replayed_parameters: those of these publishes, once for each publish.
      replay_core_seconds: core seconds per 1e9 of them.
    """
    return read_bytes / bytes_per_s + replayed_parameters / 1e9 * replay_core_seconds


def outage_seconds(config: Config, parameters: int) -> float:
    """Return the seconds that islands last on the data they hold: as long as the state
    takes to be restored, and at least `placement.outage_budget_s`."""
    name = config.launch.coordinator_machine
    machine = machine_of(name if name in MACHINES else SOME_MACHINE)
    replayed = REPLAYED_CYCLES * parameters
    restored_s = state_seconds(
        # A publish has a byte per parameter, in int8.
        STATE_BYTES * parameters + replayed,
        min(
            disk_bytes_per_s(config.launch.coordinator_disk_gb),
            machine.disk_bytes_per_s,
        ),
        replayed,
        rate_of(CONSTANTS.replay_core_seconds, config.run.sync.codec_down),
    )
    return max(config.placement.outage_budget_s, restored_s)


def lasting(config: Config, parameters: int) -> Config:
    """Return the config with an outage budget that lasts through a restart. All
    processes of a run call it, and leases and waits follow from its result."""
    outage_s = outage_seconds(config, parameters)
    placement = dataclasses.replace(config.placement, outage_budget_s=outage_s)
    return dataclasses.replace(config, placement=placement)
