"""The time that a restart of the coordinator takes, and how long islands last.

Islands train on without the coordinator, so the data that they hold, and every wait for
it, must last through its restart. The processes of a run know the model and the disk;
`diloco plan` knows the length of a cycle, too, and refuses a run whose islands do not
last.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.config import Config

PROCESS_S = 30.0
"""Seconds of a restart before the state is read: an assumption, for start and imports.
"""
MERGE_CORE_SECONDS = 5.7
"""Core seconds per 1e9 parameters of a merge, whatever its deltas: the outer step and
the encoded publish. `python benchmarks/merging.py`, int8, 2026-11-24. A publish that
recovery decodes and adds costs at most that.
"""
STATE_BYTES = 12
"""Bytes per parameter of the state: parameters, anchor and momentum in f32."""
REPLAYED_CYCLES = 6
"""Cycles whose publishes a restart is taken to replay where no plan has counted them.
12 B parameters on a disk of 2 TB: a round of snapshots takes 800 s, cycles of 93 s, and
a fragment's newest snapshot is half a round old on average."""


def disk_bytes_per_s(gigabytes: int) -> float:
    """Return what a pd-balanced disk reads or writes per second
    (cloud.google.com/compute/docs/disks/performance)."""
    return min(140 + 0.28 * gigabytes, 1200) * 1e6


def restart_seconds(
    read_bytes: float, replayed_parameters: float, bytes_per_s: float
) -> float:
    """Return the seconds from the death of the process to its service; see
    `state_seconds`."""
    return PROCESS_S + state_seconds(read_bytes, replayed_parameters, bytes_per_s)


def state_seconds(
    read_bytes: float, replayed_parameters: float, bytes_per_s: float
) -> float:
    """Return the seconds in which a starting process restores its state.

    Args:
      read_bytes: of the newest snapshots and the publishes after them, each read once.
      replayed_parameters: of these publishes, each as often as it was merged.
      bytes_per_s: of the disk.
    """
    replay_s = replayed_parameters / 1e9 * MERGE_CORE_SECONDS
    return read_bytes / bytes_per_s + replay_s


def outage_seconds(config: Config, parameters: int) -> float:
    """Return the seconds that islands last on the data they hold: as long as the state
    takes to be restored, and at least `placement.outage_budget_s`."""
    replayed = REPLAYED_CYCLES * parameters
    restored_s = state_seconds(
        # A publish has a byte per parameter, in int8.
        STATE_BYTES * parameters + replayed,
        replayed,
        disk_bytes_per_s(config.launch.coordinator_disk_gb),
    )
    return max(config.placement.outage_budget_s, restored_s)


def lasting(config: Config, parameters: int) -> Config:
    """Return the config with an outage budget that lasts through a restart. All
    processes of a run call it, and leases and waits follow from its result."""
    outage_s = outage_seconds(config, parameters)
    placement = dataclasses.replace(config.placement, outage_budget_s=outage_s)
    return dataclasses.replace(config, placement=placement)
