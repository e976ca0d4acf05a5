"""Schedules drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from diloco_jax.config import GraceWindow
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.messages import LOOKAHEAD
from diloco_jax.simulation.faults.faults import (
    CRASHES,
    JOIN_S,
    LEASE_S,
    LIKELY,
    LOSSES,
    BadDonor,
    Boast,
    ClockJump,
    Delay,
    DiskGone,
    DiskLost,
    DrawValue,
    Export,
    FullDisk,
    LongDeltas,
    MachineSleep,
    MadeUpAnchors,
    Partition,
    Removal,
    Restart,
    RunStop,
    ScheduledFault,
    SecondCoordinator,
    WorkerCrash,
    one_of,
    restart,
)
from diloco_jax.simulation.faults.liveness import merges_within_s, takes_within_s
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule

FAULTS = 5
"""Faults of every schedule, at least, drawn early enough to happen."""
LOST_SHARE = 0.3
"""Share of the crashes of workers that cost the disk; and of the schedules without
several workers in which they may."""
LOSING_SHARE = 0.35
"""Tokens of a schedule whose rule loses steps, as a share of those of others. Where
fewer survive, the run lasts longer; where it is over too soon, it is extended."""


def draw(seed: int) -> Schedule:
    """Draw a schedule from a seed.

    It has at least 3 islands and 5 faults. Unless its rule loses steps, it has tokens
    for about 5 cycles or more with a coordinator. In most schedules the faults stop
    early enough to see that the run then goes on.
    """

    def generator(of: str) -> random.Random:
        # One for each choice, so that a seed's other choices stay as they are.
        return random.Random(f"{of} {seed}")

    def perhaps(of: str, share: float) -> random.Random | None:
        rng = generator(of)
        return rng if rng.random() < share else None

    rng = generator("faults")
    schedule = _draw_run(rng, generator)
    names = "".join(schedule.islands)
    cycle_s = schedule.steps_per_cycle * schedule.pacing_s
    storm_s = JOIN_S + rng.uniform(2, 3) * cycle_s
    calm_s = rng.choice(
        [3 * cycle_s, merges_within_s(schedule), takes_within_s(schedule)]
    )
    # Later faults may come when the run is over; the first ones must not.
    faults = [_draw_fault(rng, names, storm_s) for _ in range(FAULTS)]
    if calm_s == 3 * cycle_s:
        while rng.random() < 0.7:
            over_s = storm_s + calm_s + sum(map(_down_s, faults))
            faults.append(_draw_fault(rng, names, 1.2 * over_s))
    power = generator("power")
    faults = [
        replace(fault, restart=replace(fault.restart, power_cut=True))
        if isinstance(fault, CRASHES) and power.random() >= 0.5
        else fault
        for fault in faults
    ]
    if chosen := perhaps("full", 0.3):
        faults.append(_drawn(FullDisk, chosen, storm_s))
    lying: dict[str, DrawValue] = {
        "island": one_of(*names),
        "for_s": lambda rng: round(rng.uniform(0.2, 1) * storm_s, 2),
    }
    if chosen := perhaps("liar", 0.3):
        factor = one_of(2.0, 8.0, 100.0)
        faults.append(_drawn(LongDeltas, chosen, storm_s, **lying, factor=factor))
    if chosen := perhaps("boaster", 0.1):
        factor = one_of(0.3, 1e-2, 1e-6)
        faults.append(_drawn(Boast, chosen, storm_s, **lying, factor=factor))
    chosen = perhaps("operator", 0.2)
    if chosen and not any(isinstance(fault, LOSSES) for fault in faults):
        faults.append(_drawn(Removal, chosen, storm_s, island=one_of(*names)))
    schedule, faults = _with_workers(generator, schedule, faults, storm_s)
    ordered = any(isinstance(fault, Removal) for fault in faults)
    if (chosen := perhaps("deaf", 0.15)) and not ordered:
        faults += _lost_while_deaf(chosen, names, storm_s)
    if (chosen := perhaps("made up", 0.1)) and not ordered:
        # Until the state is gathered that is lost meanwhile.
        long = {**lying, "for_s": lambda rng: 8 * LEASE_S}
        lies = _drawn(MadeUpAnchors, chosen, storm_s, **long)
        lost_s = round(lies.at_s + chosen.random(), 2)
        faults += [lies, DiskLost(at_s=lost_s, restart=restart(chosen))]
    if (chosen := perhaps("second", 0.1)) and not ordered:
        faults.append(_drawn(SecondCoordinator, chosen, storm_s))
    if chosen := perhaps("export", 0.15):
        faults += [_drawn(Export, chosen, storm_s) for _ in range(2)]
    if chosen := perhaps("stop", 0.1):
        faults.append(_drawn(RunStop, chosen, storm_s))
    # While the coordinator is down, islands go on, and nothing is merged.
    calm_s = max(calm_s, 3 * cycle_s + sum(map(_down_s, faults)))
    if chosen := perhaps("hang", 0.1):  # Transfers, about the end.
        faults.append(_hang(chosen, names, storm_s, calm_s))
    if chosen := perhaps("slept", 0.1):  # The coordinator, as the run ends.
        at_s = round(storm_s + chosen.uniform(0.5, 0.8) * calm_s, 2)
        forward_s = round(chosen.uniform(1, 10) * LEASE_S, 1)
        faults.append(ClockJump(at_s=at_s, forward_s=forward_s, at_end=True))
    if chosen := perhaps("sleep", 0.15):
        faults.append(_drawn(MachineSleep, chosen, storm_s))
    if chosen := perhaps("room", 0.5):  # In memory, for few fragments' deltas.
        schedule = replace(schedule, room=chosen.choice([1, 1, 2]))
    if chosen := perhaps("region", 0.3):
        members = names[: chosen.choice([2, 3, len(names)])]
        islands = {
            name: replace(plan, region="near" if name in members else "")
            for name, plan in schedule.islands.items()
        }
        schedule = replace(schedule, islands=islands)
        own = {**lying, "island": one_of(*members)}
        faults.append(_drawn(BadDonor, chosen, storm_s, **own))
    share = LOSING_SHARE if schedule.rule.loses_steps else 1.0
    return replace(
        schedule,
        total_tokens=int((storm_s + calm_s) * schedule.tokens_per_s * share),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _draw_run(rng: random.Random, generator: Any) -> Schedule:
    """Draw all but faults and tokens."""
    names = "abcd"[: rng.choice([3, 3, 3, 4])]
    hosts = generator("hosts")
    rules = {name: ADOPT_RULES.find(name).adopts_first for name in ADOPT_RULES.table}
    first = [name for name, adopts_first in rules.items() if adopts_first]
    others = [name for name, adopts_first in rules.items() if not adopts_first]
    lossless = generator("lossless").choice(first)
    windows: list[GraceWindow] = ["alike", "overlap"]
    fragments = rng.choice([1, 2, 2, 3])
    return Schedule(
        islands={
            name: DrawnIsland(
                step_s=rng.choice([0.8, 1.0, 1.0, 1.5, 2.5]),
                batch_size=rng.randint(1, 3),
                join_s=round(rng.uniform(0, JOIN_S), 1),
                lookahead=hosts.choice([0, 0, 0, LOOKAHEAD]),
            )
            for name in names
        },
        total_tokens=0,
        fragment_sizes=tuple(rng.randint(1, 9) for _ in range(fragments)),
        steps_per_cycle=rng.choice([3, 4, 5, 6]),
        overlap_steps=rng.choice([1, 2]),
        quorum=rng.choice([1, 1, 2, 2, len(names)]),
        grace=rng.choice([0.0, 0.8]),
        grace_window=generator("window").choice(windows),
        max_staleness=rng.choice([0, 1, 1, 2]),
        adopt=rng.choice([lossless, *others]),
        outage_s=rng.choice([20.0, 110.0, 125.0]),
        transfer_s=rng.choice([0.1, 0.4, 1.2]),
        merge_s=rng.choice([0.0, 0.1, 0.8]),
    )


def _draw_fault(rng: random.Random, names: str, latest_s: float) -> ScheduledFault:
    at_s = round(rng.uniform(0, latest_s), 2)
    kind = rng.choice(LIKELY)
    island = rng.choice(names)
    drawn = {field: draw_value(rng) for field, draw_value in kind.draws().items()}
    if "island" in kind.__struct_fields__:
        drawn["island"] = island
    if kind is DiskGone:
        drawn["gone_s"] = round(drawn["restart"].down_s + drawn["gone_s"], 2)
    return kind(at_s=at_s, **drawn)


def _drawn(
    kind: type[ScheduledFault], rng: random.Random, latest_s: float, **draws: DrawValue
) -> ScheduledFault:
    """Draw the time of a fault of this kind, and then its other values in order."""
    at_s = round(rng.uniform(0, latest_s), 2)
    values = {name: value(rng) for name, value in (draws | kind.draws()).items()}
    return kind(at_s=at_s, **values)


def _down_s(fault: ScheduledFault) -> float:
    """Return the time for which a fault leaves the run without a coordinator, about."""
    restart = getattr(fault, "restart", None)
    return restart.down_s if isinstance(restart, Restart) else 0.0


def _lost_while_deaf(
    rng: random.Random, names: str, storm_s: float
) -> list[ScheduledFault]:
    """Draw the loss of the state while an island does not hear of the last merges."""
    at_s = round(rng.uniform(0.5, 1) * storm_s, 2)
    for_s = round(rng.uniform(0.5, 1.5) * LEASE_S, 2)
    cut = Partition(at_s=at_s, island=rng.choice(names), ways=("down",), for_s=for_s)
    lost_s = round(at_s + rng.uniform(0.5, 1) * for_s, 2)
    return [cut, DiskLost(at_s=lost_s, restart=restart(rng))]


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


def _with_workers(
    generator: Any, schedule: Schedule, faults: list[ScheduledFault], storm_s: float
) -> tuple[Schedule, list[ScheduledFault]]:
    """Add workers, and what befalls them."""
    workers = generator("workers")
    if workers.random() < 0.5:
        schedule = replace(schedule, workers=workers.choice([1, 2, 3]))
        deaths = workers.choice([1, 2, 3])
        faults += [_drawn(WorkerCrash, workers, storm_s) for _ in range(deaths)]
    # Drawn last, so that the crashes of a seed stay as they are.
    lost = generator("lost")
    if schedule.workers > 1 or lost.random() < LOST_SHARE:
        faults = [
            replace(fault, disk_lost=True)
            if isinstance(fault, WorkerCrash) and lost.random() < LOST_SHARE
            else fault
            for fault in faults
        ]
    return schedule, faults
