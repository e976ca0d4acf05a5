"""How a standby comes to be in step with a primary, and how it is lost again."""

from __future__ import annotations

from standby_parts import TIMING

from diloco_jax.protocol.coordinator.events import Alert, Timer
from diloco_jax.protocol.standby import primary
from diloco_jax.protocol.standby.events import (
    Accept,
    Lapse,
    MandateRead,
    MandateWritten,
    RecordWritten,
    StandbyAnswered,
    StandbyAttached,
    StepDown,
    WriteMandate,
)
from diloco_jax.protocol.standby.mandate import Mandate
from diloco_jax.protocol.standby.primary_state import Primary


def led(now: float = 0.0) -> Primary:
    """A primary that leads alone, with no request under way."""
    state = primary.seek(TIMING, "A", "r", "1")
    state, _ = primary.step(state, Timer(), now)
    state, _ = primary.step(state, MandateRead(generation="", mandate=None), now)
    state, _ = primary.step(state, MandateWritten(generation="1"), now)
    assert state.phase == "alone"
    return state


def followed(records: int, now: float = 0.0) -> Primary:
    """The same with a standby that copies, and so many records."""
    state, effects = primary.step(led(now), StandbyAttached(node="B"), now)
    assert effects == [Accept(node="B")]
    state, _ = primary.step(state, RecordWritten(number=records), now)
    assert state.phase == "copying"
    return state


def named(state: Primary, now: float) -> Primary:
    """Have the mandate name the standby."""
    assert state.phase == "naming"
    assert state.request is not None
    assert state.request.mandate is not None
    assert state.request.mandate.in_step == "B"
    state, _ = primary.step(state, MandateWritten(generation="2"), now)
    return state


def test_a_standby_that_answered_for_all_is_named_and_then_in_step() -> None:
    state = followed(3)
    state, effects = primary.step(state, StandbyAnswered(number=3), 0.1)
    (write,) = (e for e in effects if isinstance(e, WriteMandate))
    assert write.mandate.in_step == "B"
    assert named(state, 0.2).phase == "in_step"


def test_the_primary_waits_for_a_standby_that_is_as_near_as_it_may_be() -> None:
    far = followed(primary.NEAR + 1)
    far, _ = primary.step(far, StandbyAnswered(number=0), 0.1)
    assert far.phase == "copying"
    near = followed(primary.NEAR)
    near, _ = primary.step(near, StandbyAnswered(number=0), 0.1)
    assert near.phase == "proving"


def test_a_standby_that_lives_and_gets_nowhere_is_lost() -> None:
    """Its signs of life are answers, too."""
    state, now = followed(3), 0.1
    state, _ = primary.step(state, StandbyAnswered(number=3), now)
    state = named(state, now)
    state, _ = primary.step(state, RecordWritten(number=5), now)
    while state.phase == "in_step":
        now += TIMING.patience_s / 2
        assert now < 2 * TIMING.stall_s, "it waits without an end"
        state, _ = primary.step(state, StandbyAnswered(number=3), now)
    assert state.phase == "parting"
    assert now >= TIMING.stall_s


def test_the_end_of_the_mandate_is_a_deadline_while_the_object_is_silent() -> None:
    state = led()
    state, effects = primary.step(state, Timer(), state.next_at)
    assert isinstance(effects[0], WriteMandate)
    assert primary.next_deadline(state, TIMING.renew_s) == state.valid_until


def in_step(now: float = 0.1) -> Primary:
    """A primary with a standby in step, with no request under way."""
    state, _ = primary.step(followed(3), StandbyAnswered(number=3), now)
    return named(state, now)


def test_that_the_standby_fell_silent_is_told() -> None:
    state, effects = primary.step(in_step(), Timer(), 0.1 + TIMING.patience_s)
    assert state.phase == "parting"
    (told,) = (e for e in effects if isinstance(e, Alert))
    assert "standby B is not in step any more (it was silent" in told.text


def test_a_copy_that_is_lost_is_nothing_to_tell() -> None:
    state, effects = primary.step(followed(3), Timer(), TIMING.patience_s)
    assert state.phase == "alone"
    assert not [e for e in effects if isinstance(e, Alert)]


def test_the_mandate_lapses_at_its_end() -> None:
    state = led()
    early, effects = primary.step(state, Timer(), state.valid_until - 1e-3)
    assert (Lapse() in effects, early.lapsed) == (False, False)
    late, effects = primary.step(state, Timer(), state.valid_until)
    assert (Lapse() in effects, late.lapsed) == (True, True)


def test_whoever_has_ceded_follows_and_shows_nothing_more() -> None:
    state = in_step()
    assert primary.may_show(state, 3, 0.2)
    state, _ = primary.step(state, Timer(), state.next_at)
    ceded = Mandate(run_id="r", holder="A", life="1", in_step="B", ceded=True)
    read = MandateRead(generation="3", mandate=ceded)
    state, (down,) = primary.step(state, read, state.next_at)
    assert isinstance(down, StepDown)
    assert down.follows
    assert (
        "node A has a broken disk, and has ceded the mandate to node B" in down.reason
    )
    assert not primary.may_show(state, 3, 0.2)
