"""A node whose disk is a copy does not lead by the name of the other one."""

from __future__ import annotations

from msgspec.structs import replace
from standby_parts import TIMING

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.standby import primary
from diloco_jax.protocol.standby.events import (
    MandateRead,
    MandateWritten,
    ReadMandate,
    Reign,
    StepDown,
    StoreSilent,
    WriteMandate,
    WriteRefused,
)
from diloco_jax.protocol.standby.mandate import Mandate

MINE = Mandate(run_id="r", holder="A", reign=3)


def test_a_copy_is_refused_if_the_mandate_names_it() -> None:
    state = primary.seek(TIMING, "A", "r", "1", "it is a copy")
    state, effects = primary.step(state, Timer(), 0.0)
    assert effects == [ReadMandate()]
    read = MandateRead(generation="g", mandate=MINE)
    state, effects = primary.step(state, read, 0.1)
    assert effects == [StepDown(reason="it is a copy")]
    assert state.phase == "over"


def test_it_leads_without_a_mandate_and_is_no_copy_from_then_on() -> None:
    state = primary.seek(TIMING, "A", "r", "1", "it is a copy")
    state, _ = primary.step(state, Timer(), 0.0)
    state, _ = primary.step(state, MandateRead(generation="", mandate=None), 0.1)
    state, effects = primary.step(state, MandateWritten(generation="1"), 0.2)
    assert isinstance(effects[0], Reign)
    at = state.next_at
    state, _ = primary.step(state, Timer(), at)
    state, _ = primary.step(state, StoreSilent(), at + 0.1)
    state, effects = primary.step(state, Timer(), state.next_at)
    assert effects == [ReadMandate()]
    state, effects = primary.step(
        state, MandateRead(generation="2", mandate=replace(MINE, life="1")), at + 1.0
    )
    assert not any(isinstance(effect, StepDown) for effect in effects)
    assert state.phase == "alone"


def test_the_one_that_led_ends_once_a_clone_leads_by_its_name() -> None:
    """A clone of the disk has the file with the name, and is not told by it."""
    state = primary.seek(TIMING, "A", "r", "1")
    state, _ = primary.step(state, Timer(), 0.0)
    state, _ = primary.step(state, MandateRead(generation="", mandate=None), 0.1)
    state, effects = primary.step(state, MandateWritten(generation="1"), 0.2)
    assert isinstance(effects[0], Reign)
    state, effects = primary.step(state, Timer(), state.next_at)
    assert isinstance(effects[0], WriteMandate)
    state, effects = primary.step(state, WriteRefused(), state.next_at + 0.1)
    assert effects == [ReadMandate()]
    theirs = Mandate(run_id="r", holder="A", life="2")
    read = MandateRead(generation="2", mandate=theirs)
    state, effects = primary.step(state, read, state.next_at + 0.2)
    assert isinstance(effects[0], StepDown)
    assert "another process leads as node A" in effects[0].reason
    assert state.phase == "over"


def test_a_process_that_starts_again_takes_its_nodes_mandate() -> None:
    state = primary.seek(TIMING, "A", "r", "2")
    state, _ = primary.step(state, Timer(), 0.0)
    read = MandateRead(generation="1", mandate=replace(MINE, life="1"))
    state, effects = primary.step(state, read, 0.1)
    assert effects == [WriteMandate(mandate=replace(MINE, life="2"), generation="1")]
