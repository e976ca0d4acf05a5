"""Strike a world with a fault of each kind."""

from __future__ import annotations

import functools
from typing import Any

from diloco_jax.protocol.coordinator.events import KeepAsked, Timer
from diloco_jax.simulation.faults.scene import LOOKS_EVERY_S
from diloco_jax.simulation.faults.schedule import (
    Boast,
    Break,
    ClockJump,
    CoordinatorCrash,
    Corruption,
    Delay,
    DiskFailure,
    DiskGone,
    DiskLost,
    DrawnFault,
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
    RunStop,
    SnapshotFailure,
    StepJump,
    TornWrite,
    Unfit,
    WorkerCrash,
)
from diloco_jax.simulation.faults.world import FaultyWorld


@functools.singledispatch
def strike(fault: DrawnFault, world: FaultyWorld) -> bool:
    """Do or arm a fault; return False if there is nothing to strike just now.

    `world.begun` is called once the fault really happens.
    """
    raise AssertionError(f"nothing strikes as {fault.kind}")


def _set_for(
    world: FaultyWorld, for_s: float, of: object, field: str, value: Any, usual: Any
) -> None:
    """Set a field of an object for a while, and then to its usual value again."""
    setattr(of, field, value)
    world.clock.after(for_s, lambda: setattr(of, field, usual))


# ---- islands ---------------------------------------------------------------------


@strike.register
def _(fault: IslandCrash, world: FaultyWorld) -> bool:
    return world.crash_island(
        fault.island, fault.down_s, noticed=fault.noticed, lingers=fault.lingers
    ) and world.begun(fault, fault.down_s)


@strike.register
def _(fault: JoinCrash, world: FaultyWorld) -> bool:
    if not world.crash_island(fault.island, fault.down_s):
        return False
    again_s = fault.down_s + fault.joining_s

    def again() -> None:
        world.crash_island(fault.island, fault.down_s)

    world.clock.after(again_s, again)
    return world.begun(fault, again_s + fault.down_s)


@strike.register
def _(fault: Leave, world: FaultyWorld) -> bool:
    island = world.islands[fault.island]
    if island.ended is not None:
        return False
    if fault.notice_s:
        island.notice(fault.notice_s)
    else:
        island.leave("stopped")
    again_s = fault.notice_s + fault.away_s
    world.start_island_after(again_s, fault.island)
    return world.begun(fault, again_s)


@strike.register
def _(fault: Replacement, world: FaultyWorld) -> bool:
    if world.islands[fault.island].ended is not None:
        return False
    world.start_island(fault.island)
    return world.begun(fault, 0.0)


@strike.register
def _(fault: Impostor, world: FaultyWorld) -> bool:
    island = world.islands[fault.island]
    if island.ended is not None:
        return False
    impostor = world.make_island(fault.island, island.incarnation - fault.behind)
    # No two processes have one session.
    impostor.session += f".impostor.{world.struck[fault.kind]}"
    world.connect(impostor)
    return world.begun(fault, 0.0)


@strike.register
def _(fault: StepJump, world: FaultyWorld) -> bool:
    world.slowness[fault.island] = fault.factor

    def end() -> None:
        world.slowness[fault.island] = 1.0

    world.clock.after(fault.for_s, end)
    # A step that began meanwhile keeps its length.
    step_s = fault.factor * world.schedule.islands[fault.island].step_s
    return world.begun(fault, fault.for_s + step_s)


@strike.register
def _(fault: Unfit, world: FaultyWorld) -> bool:
    island = world.islands[fault.island]
    if island.ended is not None:
        return False
    island.body.finite = False
    return world.begun(fault, 0.0)


@strike.register
def _(fault: LongDeltas, world: FaultyWorld) -> bool:
    island = world.islands[fault.island]
    if island.ended is not None:
        return False
    _set_for(world, fault.for_s, island.body, "lie", fault.factor, 1.0)
    _set_for(world, fault.for_s, island, "boasted_rates", fault.factor, 1.0)
    return world.begun(fault, fault.for_s)


@strike.register
def _(fault: Boast, world: FaultyWorld) -> bool:
    island = world.islands[fault.island]
    if island.ended is not None:
        return False
    _set_for(world, fault.for_s, island, "boast", fault.factor, 1.0)
    return world.begun(fault, fault.for_s)


# ---- an operator -----------------------------------------------------------------


@strike.register
def _(fault: Removal, world: FaultyWorld) -> bool:
    operator = world.operator
    operator.order(fault.island, admitted=False)
    world.clock.after(fault.for_s, lambda: operator.order(fault.island, admitted=True))
    return world.begun(fault, fault.for_s + LOOKS_EVERY_S)


@strike.register
def _(fault: Export, world: FaultyWorld) -> bool:
    coordinator = world.coordinator
    if coordinator is None or coordinator.waits:
        return False
    coordinator.hear(KeepAsked())
    return world.begun(fault, 0.0)


@strike.register
def _(fault: RunStop, world: FaultyWorld) -> bool:
    if not world.stop_run(fault.for_s):
        return False
    return world.begun(fault, fault.for_s)


# ---- the coordinator, its workers, its disk, its clock ---------------------------


@strike.register
def _(fault: CoordinatorCrash, world: FaultyWorld) -> bool:
    return world.crash_after(fault, fault.restart, fault.effects)


@strike.register
def _(fault: WorkerCrash, world: FaultyWorld) -> bool:
    return world.worker_crashes.arm(fault)


@strike.register
def _(fault: DiskFailure, world: FaultyWorld) -> bool:
    written_share = float(fault.written)
    return world.fail_append(fault, fault.restart, fault.appends, written_share)


@strike.register
def _(fault: TornWrite, world: FaultyWorld) -> bool:
    return world.fail_append(fault, fault.restart, fault.appends, fault.written_share)


@strike.register
def _(fault: SnapshotFailure, world: FaultyWorld) -> bool:
    world.snapshots.fail(fault)
    return True


@strike.register
def _(fault: FullDisk, world: FaultyWorld) -> bool:
    world.fill_disk(fault.for_s, brimful=fault.brimful)
    return world.begun(fault, fault.for_s)


@strike.register
def _(fault: DiskGone, world: FaultyWorld) -> bool:
    if world.coordinator is None:
        return False
    world.disk.empty = True

    def back() -> None:
        world.disk.empty = False

    world.clock.after(fault.gone_s, back)
    world.crash_coordinator(world.coordinator, fault.restart)
    gathers_s = fault.restart.down_s + world.new_term_within_s
    return world.begun(fault, max(fault.gone_s, gathers_s))


@strike.register
def _(fault: DiskLost, world: FaultyWorld) -> bool:
    if world.coordinator is None:
        return False
    world.disk.empty = True
    world.crash_coordinator(world.coordinator, fault.restart)
    return world.begun(fault, fault.restart.down_s + world.new_term_within_s)


@strike.register
def _(fault: ClockJump, world: FaultyWorld) -> bool:
    lead = world.coordinator
    if lead is None or (fault.at_end and lead.state.phase == "running"):
        return False
    lead.clock_offset += fault.forward_s
    lead.hear(Timer())
    return world.begun(fault, 0.0)


@strike.register
def _(fault: MachineSleep, world: FaultyWorld) -> bool:
    lead = world.coordinator
    if lead is None or lead.stopped:
        return False
    if fault.at_end and lead.state.phase == "running":
        return False
    lead.sleep(fault.for_s)
    return world.begun(fault, fault.for_s)


# ---- the network -----------------------------------------------------------------


@strike.register
def _(fault: Break, world: FaultyWorld) -> bool:
    return world.break_connection(
        fault.island, fault.away_s, noticed=fault.noticed, lingers=fault.lingers
    ) and world.begun(fault, fault.away_s)


@strike.register
def _(fault: Partition, world: FaultyWorld) -> bool:
    world.hold(fault.island, fault.ways, fault.for_s)
    return world.begun(fault, fault.for_s)


@strike.register
def _(fault: Repeat, world: FaultyWorld) -> bool:
    network = world.networks[fault.island]
    _set_for(world, fault.for_s, network, "repeat_after_s", fault.after_s, 0.0)
    return world.begun(fault, fault.for_s + fault.after_s)


@strike.register
def _(fault: Delay, world: FaultyWorld) -> bool:
    network, field = world.networks[fault.island], f"{fault.channel}_late_s"
    _set_for(world, fault.for_s, network, field, fault.late_s, 0.0)
    return world.begun(fault, fault.for_s + fault.late_s)


@strike.register
def _(fault: Corruption, world: FaultyWorld) -> bool:
    network = world.networks[fault.island]
    _set_for(world, fault.for_s, network, "corrupts", True, False)
    return world.begun(fault, fault.for_s)
