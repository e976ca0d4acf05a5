"""A node whose disk is a copy does not lead by the name of the other one."""

from __future__ import annotations

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
)
from diloco_jax.protocol.standby.mandate import Mandate

MINE = Mandate(run_id="r", holder="A", reign=3)


def test_a_copy_is_refused_if_the_mandate_names_it() -> None:
    state = primary.seek(TIMING, "A", "r", "it is a copy")
    state, effects = primary.step(state, Timer(), 0.0)
    assert effects == [ReadMandate()]
    read = MandateRead(generation="g", mandate=MINE)
    state, effects = primary.step(state, read, 0.1)
    assert effects == [StepDown(reason="it is a copy")]
    assert state.phase == "over"


def test_it_leads_without_a_mandate_and_is_no_copy_from_then_on() -> None:
    state = primary.seek(TIMING, "A", "r", "it is a copy")
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
        state, MandateRead(generation="2", mandate=MINE), at + 1.0
    )
    assert not any(isinstance(effect, StepDown) for effect in effects)
    assert state.phase == "alone"
