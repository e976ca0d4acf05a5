"""Workers on machines of their own, drawn for a schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from diloco_jax.simulation.faults.clock_faults import MachineSleep
from diloco_jax.simulation.faults.fault import Restart
from diloco_jax.simulation.faults.kinds import AnyFault, DiskGone, DiskLost
from diloco_jax.simulation.faults.operator import Removal
from diloco_jax.simulation.faults.schedule import LEASE_S, Schedule
from diloco_jax.simulation.faults.worker_crashes import WorkerCrash, WorkerPartition

CUT_LEASES = (0.5, 2.5, 5.0)
"""Longest partitions: in which no line breaks, the worker's end does, both do."""
CRASHES_SHARE = 0.7
"""Share of the schedules in which one more worker dies."""
LOST_SHARE = 0.25
"""Share in which the lead's disk is lost, beside those that lose it anyway."""
SLEPT_SHARE = 0.5
"""Share in which a lead that dials a worker in vain sleeps until others leave it."""


def with_workers_apart(
    rng: random.Random, schedule: Schedule, faults: Sequence[AnyFault], storm_s: float
) -> tuple[Schedule, list[AnyFault]]:
    """Return a schedule and its faults with workers on other machines.

    A disk of the lead that was to come back is lost for good: no worker would obey its
    lead after that of a new term.
    """
    workers = schedule.workers if schedule.workers > 1 else rng.choice([2, 3])
    kept = [_lost_for_good(fault) for fault in faults]
    for _ in range(rng.choice([1, 2])):
        longest_s = rng.choice(CUT_LEASES) * LEASE_S
        kept.append(_cut(rng, _time(rng, storm_s), 0.3 * longest_s, longest_s))
    if rng.random() < CRASHES_SHARE:
        kept.append(_crash(rng, _time(rng, storm_s)))
    # A loss of the state is also one of what an operator ordered.
    keeps = not any(isinstance(fault, DiskLost | Removal) for fault in kept)
    if keeps and rng.random() < LOST_SHARE:
        restart = Restart(down_s=round(rng.uniform(0.2, 9), 2))
        kept.append(DiskLost(at_s=_time(rng, storm_s), restart=restart))
    if rng.random() < SLEPT_SHARE:
        kept += _slept(rng, _time(rng, storm_s))
    return replace(schedule, workers_apart=True, workers=workers), kept


def _lost_for_good(fault: AnyFault) -> AnyFault:
    if isinstance(fault, DiskGone):
        return DiskLost(at_s=fault.at_s, restart=fault.restart)
    return fault


def _cut(
    rng: random.Random, at_s: float, least_s: float, longest_s: float
) -> WorkerPartition:
    for_s = round(rng.uniform(least_s, longest_s), 2)
    return WorkerPartition(at_s=at_s, worker=rng.randrange(3), for_s=for_s)


def _crash(rng: random.Random, at_s: float) -> WorkerCrash:
    return WorkerCrash(
        at_s=at_s,
        worker=rng.randrange(3),
        down_s=round(rng.choice([0.2, 3.0, 9.0]) * rng.uniform(0.5, 1), 2),
        noticed_s=rng.choice([0.0, 0.05, 0.3]),
        effects=rng.randrange(12),
        disk_lost=rng.random() < 0.3,
    )


def _slept(rng: random.Random, at_s: float) -> list[AnyFault]:
    """Draw a partition that breaks a worker's line, and a sleep of the lead in it."""
    cut = _cut(rng, at_s, 4.5 * LEASE_S, 7 * LEASE_S)
    later_s = round(at_s + LEASE_S * rng.uniform(2.5, 4), 2)
    for_s = round(LEASE_S * rng.uniform(2, 5), 2)
    return [cut, MachineSleep(at_s=later_s, for_s=for_s)]


def _time(rng: random.Random, latest_s: float) -> float:
    return round(rng.uniform(0, latest_s), 2)
