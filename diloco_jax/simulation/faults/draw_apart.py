"""Workers on machines of their own, drawn for a schedule with a standby."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from diloco_jax.simulation.faults.kinds import AnyFault
from diloco_jax.simulation.faults.schedule import LEASE_S, Schedule
from diloco_jax.simulation.faults.standby_faults import (
    MandateAway,
    NodeStop,
    Reached,
    WorkerCut,
)
from diloco_jax.simulation.faults.worker_crashes import WorkerCrash

CUT_FROM: tuple[Reached, ...] = ("primary", "primary", "standby", "both")
CUT_LEASES = (0.5, 2.5, 5.0)
"""Longest partitions: in which no line breaks, the worker's end does, both do."""
CRASHES_SHARE = 0.7
"""Share of the schedules in which one more worker dies."""
SUCCEEDED_SHARE = 0.5
"""Share in which a lead dials a worker in vain until another one leads."""
LONGEST_AHEAD_S = 1e6
"""Longest time by which a node's time of day is wrong."""


def with_workers_apart(
    rng: random.Random, schedule: Schedule, faults: Sequence[AnyFault], storm_s: float
) -> tuple[Schedule, list[AnyFault]]:
    """Return a schedule with a standby, and its faults, with workers elsewhere."""
    standby = schedule.standby
    assert standby is not None
    standby = replace(
        standby,
        workers_apart=True,
        unix_ahead_s=(_ahead(rng), _ahead(rng)),
    )
    workers = schedule.workers if schedule.workers > 1 else rng.choice([2, 3])
    kept = list(faults)
    for _ in range(rng.choice([1, 2])):
        kept.append(_cut(rng, _time(rng, storm_s)))
    if rng.random() < CRASHES_SHARE:
        kept.append(_crash(rng, _time(rng, storm_s)))
    if rng.random() < SUCCEEDED_SHARE:
        kept += _succeeded(rng, _time(rng, storm_s))
    return replace(schedule, standby=standby, workers=workers), kept


def _cut(rng: random.Random, at_s: float) -> WorkerCut:
    to: Reached = rng.choice(CUT_FROM)
    for_s = round(rng.choice(CUT_LEASES) * LEASE_S * rng.uniform(0.3, 1), 2)
    return WorkerCut(at_s=at_s, worker=rng.randrange(3), to=to, for_s=for_s)


def _crash(rng: random.Random, at_s: float) -> WorkerCrash:
    return WorkerCrash(
        at_s=at_s,
        worker=rng.randrange(3),
        down_s=round(rng.choice([0.2, 3.0, 9.0]) * rng.uniform(0.5, 1), 2),
        noticed_s=rng.choice([0.0, 0.05, 0.3]),
        effects=rng.randrange(12),
        disk_lost=rng.random() < 0.3,
    )


def _succeeded(rng: random.Random, at_s: float) -> list[AnyFault]:
    """Draw a partition from the lead that breaks the line, in which the lead's mandate
    ends while it dials again."""
    cut = WorkerCut(
        at_s=at_s,
        worker=rng.randrange(3),
        to="primary",
        for_s=round(LEASE_S * rng.uniform(4.5, 7), 2),
    )
    later_s = round(at_s + LEASE_S * rng.uniform(2.5, 4), 2)
    for_s = round(LEASE_S * rng.uniform(2, 5), 2)
    if rng.random() < 0.5:
        return [cut, MandateAway(at_s=later_s, to="primary", for_s=for_s)]
    return [cut, NodeStop(at_s=later_s, part="primary", for_s=for_s)]


def _ahead(rng: random.Random) -> float:
    return rng.choice([0.0, round(rng.uniform(0, LONGEST_AHEAD_S), 0)])


def _time(rng: random.Random, latest_s: float) -> float:
    return round(rng.uniform(0, latest_s), 2)
