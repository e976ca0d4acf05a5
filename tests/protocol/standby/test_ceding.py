"""A primary whose disk breaks leaves the run to its standby at once."""

from __future__ import annotations

import pytest
from standby_parts import TIMING, Plant
from standby_play import STRIKES, calm, named, play
from standby_world import LOAD_S

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.standby import following, primary
from diloco_jax.protocol.standby.events import (
    DiskBroken,
    MandateRead,
    RunFinished,
    StateLoaded,
)
from diloco_jax.protocol.standby.mandate import Mandate


def test_a_primary_that_cannot_read_its_disk_cedes_to_its_standby() -> None:
    """Each of its starts had renewed the mandate: its standby waited for as long as
    somebody started it."""
    world = calm()
    world.crash("A")
    world.start("A", "primary")
    world.run(LOAD_S / 2)
    node = world.nodes["A"]
    world._give(node, DiskBroken())
    world._give(node, StateLoaded())
    ceded = world.now
    world.run(1.0)
    assert node.machine is None, "it has stepped down"
    for wait in range(20):
        role = ("primary", "standby")[wait % 2]
        world.start("A", role)
        world.run(0.5)
    at, _, by = next(led for led in world.led if led[1] == "B")
    assert by == "log"
    assert at - ceded <= TIMING.renew_s + 0.1
    assert [led[1] for led in world.led].count("A") == 2, "it does not lead again"
    assert world.mandate is not None
    assert not world.mandate.ceded


def test_one_in_step_cedes_as_it_leads_and_shows_nothing_from_then_on() -> None:
    """Its standby has all that was seen, even if it is not heard any more."""
    world = calm()
    node = world.nodes["A"]
    world.cut.add("A")
    world._give(node, DiskBroken())
    shown, written = len(world.visible), len(node.disk)
    machine = node.machine
    assert machine is not None
    assert not primary.may_show(machine, machine.visible, machine.valid_until - 1e-3)
    world.run(1.0)
    assert len(node.disk) > written, "its standby has answered for more"
    world.cut.add("line")
    world.run(TIMING.patience_s + 1.0)
    assert len(world.visible) == shown
    assert node.machine is not None, "the object has not answered"
    assert named(world) == "B"
    world.cut.clear()
    heard = world.now
    world.run(2 * TIMING.renew_s)
    at, _, by = next(led for led in world.led if led[1] == "B")
    assert by == "log"
    assert at - heard < 2 * TIMING.renew_s
    assert node.machine is None, "it has stepped down"


def test_a_run_that_is_over_is_not_ceded() -> None:
    """Its standby has ended, and nobody else would end the run."""
    world = calm()
    node = world.nodes["A"]
    world._give(node, RunFinished())
    world._give(node, DiskBroken())
    world.run(1.0)
    assert world.mandate is not None
    assert (world.mandate.over, world.mandate.ceded) == (True, False)


@pytest.mark.parametrize("strike", ["damage", "dying"])
def test_nothing_is_lost_where_disks_break(strike: str) -> None:
    ceded = 0
    for seed in range(30):
        world = play(seed, Plant(), [*STRIKES, strike, strike])
        ceded += sum(by == "log" for _, _, by in world.led)
    assert ceded > 20


def test_a_primary_alone_cedes_nothing() -> None:
    """Nobody else has what is on its disk; a copy of it may be restored."""
    world = calm()
    world.cut.add("line")
    world.run(10.0)
    world.crash("A")
    world.start("A", "primary")
    world.run(1.0)
    world._give(world.nodes["A"], DiskBroken())
    world.run(1.0)
    assert world.mandate is not None
    assert not world.mandate.ceded


def test_who_has_ceded_waits_as_long_as_one_whose_disk_is_lost() -> None:
    state = following.begin(TIMING, "A", empty=False)
    state, _ = following.step(state, Timer(), 0.0)
    mandate = Mandate(run_id="r", holder="A", in_step="B", ceded=True)
    read = MandateRead(generation="g", mandate=mandate)
    state, effects = following.step(state, read, 0.1)
    assert effects == []
    assert state.phase == "apart"
    assert following._claims_at(state) == pytest.approx(0.1 + TIMING.gathering_s)
