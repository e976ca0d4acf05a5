"""A primary that cannot read its disk leaves the run to its standby at once."""

from __future__ import annotations

import pytest
from standby_parts import TIMING, Plant
from standby_play import STRIKES, calm, play
from standby_world import LOAD_S

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.standby import following
from diloco_jax.protocol.standby.events import (
    DiskUnreadable,
    MandateRead,
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
    world._give(node, DiskUnreadable())
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


def test_nothing_is_lost_where_disks_are_found_damaged() -> None:
    ceded = 0
    for seed in range(30):
        world = play(seed, Plant(), [*STRIKES, "damage", "damage"])
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
    world._give(world.nodes["A"], DiskUnreadable())
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
