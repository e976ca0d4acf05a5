"""A standby and its faults, drawn for a schedule that has none yet."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from diloco_jax.simulation.faults import kinds
from diloco_jax.simulation.faults.fault import Restart
from diloco_jax.simulation.faults.kinds import AnyFault
from diloco_jax.simulation.faults.schedule import LEASE_S, DrawnStandby, Schedule
from diloco_jax.simulation.faults.standby_faults import (
    DiskDamage,
    LoadCrash,
    MandateAway,
    MandateLate,
    NodeLoss,
    NodeStop,
    Part,
    Reached,
    StandbyCrash,
    StandbyFull,
    StandbyPartition,
)

RATES = 0.02
"""Largest share by which a clock goes wrong: the mandate allows for twice that."""
APART_SHARE = 0.4
"""Share of the schedules in which the primary dies while its standby is away."""
LOST_SHARE = 0.3
"""Share of the schedules in which the disk of either node is lost, beside those that
lose the coordinator's disk anyway."""
FULL_SHARE = 0.3
"""Share in which the standby's disk is full for a while."""
LATE_SHARE = 0.3
"""Share in which requests reach the object late."""
DAMAGED_SHARE = 0.2
"""Share in which the primary finds its disk damaged as it starts again."""
LOADING_SHARE = 0.3
"""Share in which a coordinator takes a while to load its state, and dies in it."""
LATE_S = (0.3, 2.0, 30.0)
"""Longest lateness in seconds: with an answer in time, without one, and for longer than
anything waits."""
LONG_S = 3 * LEASE_S
"""Longest time for which something is away: longer than any standby waits."""
REACHED: tuple[Reached, ...] = ("primary", "standby", "both")
PARTS: tuple[Part, ...] = ("primary", "standby")
RENAMED_SHARE = 0.5
"""Share of the lost disks with which the node's name is lost."""
STOPPED: tuple[Part, ...] = ("primary", "primary", "standby")


def with_standby(
    rng: random.Random, schedule: Schedule, faults: Sequence[AnyFault], storm_s: float
) -> tuple[Schedule, list[AnyFault]]:
    """Return the schedule and its faults with a standby, and faults of it.

    A disk of a coordinator that was to come back does not go: its crash is long
    instead.
    """
    standby = DrawnStandby(
        copy_s=rng.choice([0.1, 0.5, 3.0]),
        rates=(_rate(rng), _rate(rng)),
    )
    kept = [_of_a_node(rng, fault) for fault in faults]
    for _ in range(rng.choice([1, 2, 3])):
        kept.append(_draw_fault(rng, storm_s))
    if rng.random() < APART_SHARE:
        kept += _apart(rng, storm_s)
    if rng.random() < LOST_SHARE:
        part: Part = rng.choice(PARTS)
        kept.append(_loss(rng, _time(rng, storm_s), part))
    if rng.random() < FULL_SHARE:
        kept.append(StandbyFull(at_s=_time(rng, storm_s), for_s=_seconds(rng)))
    if rng.random() < LATE_SHARE:
        kept.append(_lateness(rng, storm_s))
    if rng.random() < LOADING_SHARE:
        standby = replace(standby, load_s=rng.choice([0.3, 2.0, LEASE_S]))
        kept.append(_death_while_loading(rng, _time(rng, storm_s), standby.load_s))
    if rng.random() < DAMAGED_SHARE:
        restart = replace(_restart(rng), down_s=_seconds(rng))
        kept.append(DiskDamage(at_s=_time(rng, storm_s), restart=restart))
    return replace(schedule, standby=standby), kept


def _of_a_node(rng: random.Random, fault: AnyFault) -> AnyFault:
    if not isinstance(fault, kinds.DiskGone | kinds.DiskLost):
        return fault
    restart = replace(fault.restart, down_s=_seconds(rng))
    if isinstance(fault, kinds.DiskLost):
        renamed = rng.random() < RENAMED_SHARE
        return NodeLoss(
            at_s=fault.at_s, part="primary", restart=restart, renamed=renamed
        )
    return kinds.CoordinatorCrash(at_s=fault.at_s, restart=restart)


def _loss(rng: random.Random, at_s: float, part: Part) -> AnyFault:
    renamed = rng.random() < RENAMED_SHARE
    return NodeLoss(at_s=at_s, part=part, restart=_restart(rng), renamed=renamed)


def _lateness(rng: random.Random, latest_s: float) -> AnyFault:
    to: Reached = rng.choice(REACHED)
    late_s = round(rng.choice(LATE_S) * rng.uniform(0.3, 1), 2)
    at_s = _time(rng, latest_s)
    return MandateLate(at_s=at_s, to=to, for_s=_seconds(rng), late_s=late_s)


def _draw_fault(rng: random.Random, latest_s: float) -> AnyFault:
    at_s, for_s = _time(rng, latest_s), _seconds(rng)
    match rng.randrange(6):
        case 0:
            return _death(rng, at_s)
        case 1:
            return StandbyCrash(at_s=at_s, down_s=for_s)
        case 2:
            return StandbyPartition(at_s=at_s, for_s=for_s)
        case 3:
            to: Reached = rng.choice(REACHED)
            return MandateAway(at_s=at_s, to=to, for_s=for_s)
        case _:
            part: Part = rng.choice(STOPPED)
            return NodeStop(at_s=at_s, part=part, for_s=for_s)


def _apart(rng: random.Random, latest_s: float) -> list[AnyFault]:
    """Draw a death of the primary with a standby that is not in step."""
    at_s = _time(rng, latest_s)
    for_s = round(LONG_S * rng.uniform(0.5, 1), 2)
    away: AnyFault = StandbyPartition(at_s=at_s, for_s=for_s)
    if rng.random() < 0.5:
        away = StandbyCrash(at_s=at_s, down_s=LEASE_S)
    return [away, _death(rng, round(at_s + LEASE_S / 2, 2))]


def _death(rng: random.Random, at_s: float) -> AnyFault:
    restart = _restart(rng)
    return kinds.CoordinatorCrash(at_s=at_s, effects=rng.randrange(12), restart=restart)


def _restart(rng: random.Random) -> Restart:
    return Restart(
        down_s=round(LONG_S * rng.uniform(0.2, 1), 2),
        clock_s=round(5000 * rng.random(), 1),
        noticed_s=rng.choice([0.0, LEASE_S]),
    )


def _death_while_loading(rng: random.Random, at_s: float, load_s: float) -> AnyFault:
    return LoadCrash(
        at_s=at_s,
        down_s=round(LEASE_S * rng.uniform(0.1, 0.5), 2),
        loading_s=round(load_s * rng.uniform(0.2, 1.2), 2),
        restart=_restart(rng),
    )


def _time(rng: random.Random, latest_s: float) -> float:
    return round(rng.uniform(0, latest_s), 2)


def _seconds(rng: random.Random) -> float:
    """Draw seconds shorter or longer than the mandate is valid."""
    return round(
        rng.choice([0.3, 1.5, LONG_S / LEASE_S]) * LEASE_S * rng.uniform(0.3, 1), 2
    )


def _rate(rng: random.Random) -> float:
    return round(1 + rng.uniform(-RATES, RATES), 4)
