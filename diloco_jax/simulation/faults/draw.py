"""Schedules drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from diloco_jax.config import GraceWindow
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.values import LEAD
from diloco_jax.simulation.faults.liveness import merges_within_s, takes_within_s
from diloco_jax.simulation.faults.schedule import (
    LEASE_S,
    AnyFault,
    Boast,
    Break,
    ClockJump,
    CoordinatorCrash,
    Corruption,
    Delay,
    DiskFailure,
    DiskGone,
    DiskLost,
    DrawnIsland,
    Export,
    FullDisk,
    Impostor,
    IslandCrash,
    JoinCrash,
    Leave,
    LongDeltas,
    MachineSleep,
    Partition,
    Removal,
    Repeat,
    Replacement,
    Restart,
    RunStop,
    Schedule,
    SnapshotFailure,
    StepJump,
    TornWrite,
    Unfit,
    WorkerCrash,
)

DrawValue = Callable[[random.Random], Any]

FAULTS = 5
"""Faults of every schedule, at least, drawn early enough to happen."""
JOIN_S = 2.0
"""Longest join in seconds, about the time until the first step."""
CRASHES = (CoordinatorCrash, DiskFailure, TornWrite)
"""Crashes of a coordinator whose disk stays; half of them come with a power cut."""
WORKERS_SHARE = 0.5
"""Share of the schedules in which workers die."""
LOST_SHARE = 0.3
"""Share of the crashes of workers that cost the disk; and of the schedules without
several workers in which they may."""
FULL_SHARE = 0.3
"""Share of the schedules in which the disk is full for a while."""
LOSSES = (DiskGone, DiskLost)
"""Losses of a state, and with it of what an operator ordered."""
REMOVED_SHARE = 0.2
"""Share of the other schedules in which an operator puts an island out for a while."""
EXPORTED_SHARE = 0.15
"""Share of the schedules in which an operator exports the run."""
STOPPED_SHARE = 0.1
"""Share of the schedules in which an operator stops and resumes the run."""
LIAR_SHARE = 0.3
"""Share of the schedules in which an island lies for a while."""
BOASTER_SHARE = 0.1
"""Share of the schedules in which an island says for a while that it is faster."""
HANG_SHARE = 0.1
"""Share of the schedules in which an island's transfers hang about the end."""
SLEPT_SHARE = 0.1
"""Share of the schedules in which the coordinator's clock jumps as the run ends."""
ASLEEP_SHARE = 0.15
"""Share of the schedules in which the coordinator's machine sleeps, its clock too."""
CROWDED_SHARE = 0.5
"""Share of the schedules in which memory has room for few fragments' deltas."""
LOSING_SHARE = 0.35
"""Tokens of a schedule whose rule loses steps, as a share of those of others. Where
fewer survive, the run lasts longer; where it is over too soon, it is extended."""


def draw(seed: int) -> Schedule:
    """Draw a schedule from a seed.

    It has at least 3 islands and 5 faults. Unless its rule loses steps, it has tokens
    for about 5 cycles or more with a coordinator. In most schedules the faults stop
    early enough to see that the run then goes on.
    """
    rng = random.Random(f"faults {seed}")
    names = "abcd"[: rng.choice([3, 3, 3, 4])]
    # These have generators of their own, so that a seed's other choices stay as they
    # are.
    hosts = random.Random(f"hosts {seed}")
    rules = {name: ADOPT_RULES.find(name).adopts_first for name in ADOPT_RULES.table}
    first = [name for name, adopts_first in rules.items() if adopts_first]
    others = [name for name, adopts_first in rules.items() if not adopts_first]
    lossless = random.Random(f"lossless {seed}").choice(first)
    windows: list[GraceWindow] = ["alike", "overlap"]
    window = random.Random(f"window {seed}").choice(windows)
    fragments = rng.choice([1, 2, 2, 3])
    schedule = Schedule(
        islands={
            name: DrawnIsland(
                step_s=rng.choice([0.8, 1.0, 1.0, 1.5, 2.5]),
                batch_size=rng.randint(1, 3),
                join_s=round(rng.uniform(0, JOIN_S), 1),
                lead=hosts.choice([0, 0, 0, LEAD]),
            )
            for name in names
        },
        total_tokens=0,
        fragment_sizes=tuple(rng.randint(1, 9) for _ in range(fragments)),
        steps_per_cycle=rng.choice([3, 4, 5, 6]),
        overlap_steps=rng.choice([1, 2]),
        quorum=rng.choice([1, 1, 2, 2, len(names)]),
        grace=rng.choice([0.0, 0.8]),
        grace_window=window,
        max_staleness=rng.choice([0, 1, 1, 2]),
        adopt=rng.choice([lossless, *others]),
        outage_s=rng.choice([20.0, 110.0, 125.0]),
        transfer_s=rng.choice([0.1, 0.4, 1.2]),
        merge_s=rng.choice([0.0, 0.1, 0.8]),
    )
    cycle_s = schedule.steps_per_cycle * schedule.pacing_s
    storm_s = JOIN_S + rng.uniform(2, 3) * cycle_s
    calm_s = rng.choice(
        [
            3 * cycle_s,
            merges_within_s(schedule),
            takes_within_s(schedule),
        ]
    )
    # Later faults may come when the run is over; the first ones must not.
    faults = [_draw_fault(rng, names, storm_s) for _ in range(FAULTS)]
    if calm_s == 3 * cycle_s:
        while rng.random() < 0.7:
            over_s = storm_s + calm_s + sum(map(_down_s, faults))
            faults.append(_draw_fault(rng, names, 1.2 * over_s))
    power = random.Random(f"power {seed}")
    faults = [_as_power_cut(power, fault) for fault in faults]
    full = random.Random(f"full {seed}")
    if full.random() < FULL_SHARE:
        fault = _drawn(FullDisk, full, storm_s, for_s=_seconds, brimful=_coin)
        faults.append(fault)
    liar = random.Random(f"liar {seed}")
    if liar.random() < LIAR_SHARE:
        faults.append(
            _drawn(
                LongDeltas,
                liar,
                storm_s,
                island=_one_of(*names),
                for_s=lambda rng: round(rng.uniform(0.2, 1) * storm_s, 2),
                factor=_one_of(2.0, 8.0, 100.0),
            )
        )
    boaster = random.Random(f"boaster {seed}")
    if boaster.random() < BOASTER_SHARE:
        faults.append(
            _drawn(
                Boast,
                boaster,
                storm_s,
                island=_one_of(*names),
                for_s=lambda rng: round(rng.uniform(0.2, 1) * storm_s, 2),
                factor=_one_of(0.3, 1e-2, 1e-6),
            )
        )
    operator = random.Random(f"operator {seed}")
    loses = any(isinstance(fault, LOSSES) for fault in faults)
    if operator.random() < REMOVED_SHARE and not loses:
        island = _one_of(*names)
        faults.append(_drawn(Removal, operator, storm_s, island=island, for_s=_seconds))
    workers = random.Random(f"workers {seed}")
    if workers.random() < WORKERS_SHARE:
        schedule = msgspec.structs.replace(schedule, workers=workers.choice([1, 2, 3]))
        faults += [
            _drawn(WorkerCrash, workers, storm_s, **WORKER_CRASH)
            for _ in range(workers.choice([1, 2, 3]))
        ]
    # Drawn last, so that the crashes of a seed stay as they are.
    lost = random.Random(f"lost {seed}")
    if schedule.workers > 1 or lost.random() < LOST_SHARE:
        faults = [_with_lost_disk(lost, fault) for fault in faults]
    export = random.Random(f"export {seed}")
    if export.random() < EXPORTED_SHARE:
        faults += [_drawn(Export, export, storm_s) for _ in range(2)]
    stop = random.Random(f"stop {seed}")
    if stop.random() < STOPPED_SHARE:
        faults.append(_drawn(RunStop, stop, storm_s, for_s=_seconds))
    # While the coordinator is down, islands go on, and nothing is merged.
    calm_s = max(calm_s, 3 * cycle_s + sum(map(_down_s, faults)))
    hang = random.Random(f"hang {seed}")
    if hang.random() < HANG_SHARE:
        faults.append(_hang(hang, names, storm_s, calm_s))
    slept = random.Random(f"slept {seed}")
    if slept.random() < SLEPT_SHARE:
        at_s = round(storm_s + slept.uniform(0.5, 0.8) * calm_s, 2)
        jump = ClockJump(
            at_s=at_s, forward_s=round(slept.uniform(1, 10) * LEASE_S, 1), at_end=True
        )
        faults.append(jump)
    sleep = random.Random(f"sleep {seed}")
    if sleep.random() < ASLEEP_SHARE:
        draws = {"for_s": _sleep_seconds, "at_end": lambda rng: rng.random() < 0.3}
        faults.append(_drawn(MachineSleep, sleep, storm_s, **draws))
    room = random.Random(f"room {seed}")
    if room.random() < CROWDED_SHARE:
        schedule = msgspec.structs.replace(schedule, room=room.choice([1, 1, 2]))
    share = LOSING_SHARE if schedule.rule.loses_steps else 1.0
    return msgspec.structs.replace(
        schedule,
        total_tokens=int((storm_s + calm_s) * schedule.tokens_per_s * share),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _draw_fault(rng: random.Random, names: str, latest_s: float) -> AnyFault:
    at_s = round(rng.uniform(0, latest_s), 2)
    kind, draws = rng.choice(KINDS)
    island = rng.choice(names)
    drawn = {field: draw_value(rng) for field, draw_value in draws.items()}
    if "island" in kind.__struct_fields__:
        drawn["island"] = island
    if kind is DiskGone:
        drawn["gone_s"] = round(drawn["restart"].down_s + drawn["gone_s"], 2)
    return kind(at_s=at_s, **drawn)


def _down_s(fault: AnyFault) -> float:
    """Return the time for which a fault leaves the run without a coordinator, about."""
    restart = getattr(fault, "restart", None)
    return restart.down_s if isinstance(restart, Restart) else 0.0


def _drawn(
    kind: type[AnyFault], rng: random.Random, latest_s: float, **draws: DrawValue
) -> AnyFault:
    """Draw the time of a fault of this kind, and then its other values in order."""
    at_s = round(rng.uniform(0, latest_s), 2)
    return kind(at_s=at_s, **{name: value(rng) for name, value in draws.items()})


def _hang(rng: random.Random, names: str, storm_s: float, calm_s: float) -> Delay:
    """Draw a time near the end of the run in which transfers come so late that the
    flush may be over."""
    return Delay(
        at_s=round(storm_s + rng.uniform(0.5, 1) * calm_s, 2),
        island=rng.choice(names),
        for_s=round(rng.uniform(0.3, 1) * calm_s, 2),
        late_s=round(rng.uniform(1, 8) * LEASE_S, 1),
        channel="bulk",
    )


def _as_power_cut(rng: random.Random, fault: AnyFault) -> AnyFault:
    """Return the fault, or the same with a power cut if it is one of `CRASHES`."""
    if not isinstance(fault, CRASHES) or rng.random() < 0.5:
        return fault
    restart = msgspec.structs.replace(fault.restart, power_cut=True)
    return msgspec.structs.replace(fault, restart=restart)


def _restart(rng: random.Random) -> Restart:
    return Restart(
        down_s=_down_seconds(rng, 0.2, 3.0, 9.0),
        clock_s=round(rng.choice([10.0, 5000.0]) * rng.random(), 1),
        noticed_s=rng.choice([0.0, 0.0, 4.0]),
    )


def _down_seconds(rng: random.Random, *longest: float) -> float:
    """Draw seconds up to one of these."""
    return round(rng.choice(longest) * rng.uniform(0.5, 1), 2)


def _seconds(rng: random.Random) -> float:
    """Draw seconds shorter or longer than a lease."""
    return round(rng.choice([0.3, 1.0, 2.0]) * LEASE_S * rng.uniform(0.3, 1), 2)


def _sleep_seconds(rng: random.Random) -> float:
    """Draw seconds shorter, longer or much longer than a lease."""
    return round(_seconds(rng) * rng.choice([1.0, 1.0, 5.0]), 2)


def _none_or_seconds(rng: random.Random) -> float:
    return rng.choice([0.0, _seconds(rng)])


def _coin(rng: random.Random) -> bool:
    return rng.random() < 0.5


def _one_of(*values: Any) -> DrawValue:
    return lambda rng: rng.choice(values)


def _below(stop: int) -> DrawValue:
    return lambda rng: rng.randrange(stop)


def _uniform(low: float, high: float, digits: int = 2) -> DrawValue:
    return lambda rng: round(rng.uniform(low, high), digits)


def _with_lost_disk(rng: random.Random, fault: AnyFault) -> AnyFault:
    if not isinstance(fault, WorkerCrash) or rng.random() >= LOST_SHARE:
        return fault
    return msgspec.structs.replace(fault, disk_lost=True)


WORKER_CRASH: dict[str, DrawValue] = {
    "worker": _below(3),
    "down_s": lambda rng: _down_seconds(rng, 0.2, 3.0, 9.0),
    "noticed_s": _one_of(0.0, 0.0, 0.05, 0.3),
    "effects": _below(12),
}
CRASH: dict[str, DrawValue] = {"effects": _below(12), "restart": _restart}
KINDS: tuple[tuple[type[AnyFault], dict[str, DrawValue]], ...] = (
    (
        IslandCrash,
        {"down_s": _seconds, "noticed": _coin, "lingers": _coin},
    ),
    (
        JoinCrash,
        {"down_s": _uniform(0.1, 3), "joining_s": _uniform(0, JOIN_S)},
    ),
    (Leave, {"away_s": _seconds, "notice_s": _one_of(0.0, 0.3, 3.0)}),
    (Replacement, {}),
    (Impostor, {"behind": _below(2)}),
    (StepJump, {"for_s": _seconds, "factor": _one_of(0.4, 3.0, 8.0)}),
    (Unfit, {}),
    (CoordinatorCrash, CRASH),
    (CoordinatorCrash, CRASH),
    (
        DiskFailure,
        {"appends": _below(3), "written": _coin, "restart": _restart},
    ),
    (
        TornWrite,
        {
            "appends": _below(3),
            "written_share": _uniform(0.02, 0.98),
            "restart": _restart,
        },
    ),
    (SnapshotFailure, {}),
    # Seconds from the coordinator's return to the return of its disk.
    (DiskGone, {"restart": _restart, "gone_s": lambda rng: rng.uniform(0, 6)}),
    (DiskLost, {"restart": _restart}),
    (ClockJump, {"forward_s": _uniform(1, 40, digits=1)}),
    (
        Break,
        {"away_s": _none_or_seconds, "noticed": _coin, "lingers": _coin},
    ),
    (
        Partition,
        {"ways": _one_of(("up",), ("down",), ("up", "down")), "for_s": _seconds},
    ),
    (Repeat, {"for_s": _seconds, "after_s": _one_of(0.01, 0.5, 3.0)}),
    (
        Delay,
        {
            "for_s": _seconds,
            "late_s": _uniform(0.5, 4, digits=1),
            "channel": _one_of("control", "bulk"),
        },
    ),
    (Corruption, {"for_s": _seconds}),
)
"""Kinds of faults, equally likely, and how the values of each are drawn, in order."""
