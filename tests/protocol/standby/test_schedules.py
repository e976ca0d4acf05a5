"""Random schedules of two coordinators: what must hold always, and what breaks it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from msgspec.structs import replace
from standby_parts import TIMING, BrokenError, Plant
from standby_play import calm, named, play
from standby_world import LOAD_S

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.coordinator.machines import StateMachine
from diloco_jax.protocol.standby import following, primary
from diloco_jax.protocol.standby.events import (
    Dial,
    HangUp,
    MandateRead,
    MandateWritten,
    ReadMandate,
    Reign,
    Release,
    Retire,
    StateLoaded,
    TakeOver,
    WriteMandate,
)
from diloco_jax.protocol.standby.mandate import Mandate, MandateTiming
from diloco_jax.protocol.standby.primary_state import Primary

SEEDS = range(100)


def test_nothing_that_was_visible_is_lost_and_no_two_merge() -> None:
    how, records = Counter[str](), 0
    for seed in SEEDS:
        world = play(seed, Plant())
        how.update(by for _, _, by in world.led)
        records += len(world.visible)
    assert how["log"] > 50
    assert how["gathering"] > 10
    assert how["seat"] > 200
    assert records > 100 * len(SEEDS)


def late(timing: MandateTiming, times: float) -> MandateTiming:
    return MandateTiming(
        valid_s=timing.valid_s * times,
        renew_s=timing.renew_s,
        patience_s=timing.patience_s,
    )


PLANTS = {
    "a write replaces any generation": Plant(generations=False),
    "the primary counts on its mandate for too long": Plant(primary=late(TIMING, 9)),
    "the standby answers for what it does not have": Plant(answers_ahead=3),
    "a lost disk still counts": Plant(notices_loss=False),
    "what found no room counts as written": Plant(notices_full=False),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_in_the_world_is_found(name: str) -> None:
    assert found(PLANTS[name])


def found(plant: Plant = Plant()) -> bool:  # noqa: B008
    for seed in SEEDS:
        try:
            play(seed, plant)
        except BrokenError:
            return True
    return False


def test_what_is_visible_before_the_standby_has_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(primary, "GATED", ())
    assert found()


def test_going_on_before_the_mandate_says_so_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves = {state: dict(after) for state, after in primary.PRIMARY.moves.items()}
    moves["in_step"]["lose"] = moves["naming"]["lose"] = "alone"
    monkeypatch.setattr(primary, "PRIMARY", StateMachine("primary", moves))
    assert found()


def test_showing_something_while_the_mandate_names_a_standby_of_before_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves = {state: dict(after) for state, after in primary.PRIMARY.moves.items()}
    moves["loading"]["show"] = "alone"
    monkeypatch.setattr(primary, "PRIMARY", StateMachine("primary", moves))
    assert found()


def test_a_log_that_lacks_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "in_step", lambda state: True)
    assert found()


def test_naming_a_standby_that_lags_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = primary._answered

    def at_once(state: Primary, number: int, now: float) -> Primary:
        state = step(state, number, now)
        return state if number < 0 else step(state, state.written, now)

    monkeypatch.setattr(primary, "_answered", at_once)
    assert found()


def test_a_standby_in_step_takes_over_within_a_budget_of_the_end() -> None:
    world = calm()
    world.crash("A")
    died, seen = world.now, list(world.visible)
    world.run(2 * TIMING.valid_s)
    at, who, by = next(led for led in world.led if led[1] == "B")
    assert (who, by) == ("B", "log")
    assert at - died <= TIMING.expiry_s + TIMING.renew_s + 0.1
    assert set(seen) < set(world.visible)


def test_a_primary_that_only_starts_again_goes_on() -> None:
    world = calm()
    world.crash("A")
    world.at(3.0, lambda: world.start("A", "primary"))
    world.run(40.0)
    assert [who for _, who, _ in world.led] == ["A", "A"]
    assert named(world) == "B"


def test_a_primary_that_dies_again_while_it_loads_leaves_its_standby_in_step() -> None:
    world = calm()
    world.cut.add("line")
    world.crash("A")
    world.start("A", "primary")
    world.run(LOAD_S / 2)
    assert named(world) == "B"
    world.crash("A")
    world.run(2 * TIMING.valid_s)
    assert [led[1:] for led in world.led] == [
        ("A", "seat"),
        ("A", "seat"),
        ("B", "log"),
        ("B", "seat"),
    ]


def test_a_primary_that_has_loaded_goes_on_alone() -> None:
    world = calm()
    seen = len(world.visible)
    world.cut.add("line")
    world.crash("A")
    world.start("A", "primary")
    world.run(LOAD_S + 2)
    assert named(world) == ""
    assert len(world.visible) > seen


def test_a_standby_that_is_not_in_step_waits_and_gathers() -> None:
    world = calm()
    world.cut.add("line")
    world.run(10.0)
    assert named(world) == ""
    before = len(world.visible)
    world.run(10.0)
    assert len(world.visible) > before  # The primary goes on alone.
    world.crash("A")
    died = world.now
    world.run(60.0)
    at, _, by = next(led for led in world.led if led[1] == "B")
    assert by == "gathering"
    assert TIMING.gathering_s - TIMING.renew_s < at - died < TIMING.gathering_s + 5
    assert world.mandate is not None
    assert world.mandate.holder == "B"
    assert not world.mandate.gathers


def test_a_primary_that_was_stopped_shows_nothing_and_steps_down() -> None:
    world = calm()
    world.pause("A", 40.0)
    world.run(39.0)
    assert [led[1:] for led in world.led] == [
        ("A", "seat"),
        ("B", "log"),
        ("B", "seat"),
    ]
    world.run(10.0)
    assert world.nodes["A"].machine is None
    world.start("A", "standby")
    world.run(20.0)
    assert world.mandate is not None
    assert (world.mandate.holder, world.mandate.in_step) == ("B", "A")


def test_a_partition_between_the_two_leaves_the_primary_in_charge() -> None:
    world = calm()
    world.cut.add("line")
    world.run(60.0)
    assert [who for _, who, _ in world.led] == ["A"]
    before = len(world.visible)
    world.cut.clear()
    world.run(10.0)
    assert len(world.visible) > before
    assert named(world) == "B"


def test_a_primary_that_loses_the_object_lets_islands_go_elsewhere() -> None:
    world = calm()
    world.cut.add("A")
    world.run(4 * TIMING.valid_s)
    assert world.lapsed == ["A"]
    assert [who for _, who, by in world.led if by == "seat"] == ["A", "B"]
    assert world.nodes["A"].machine is not None  # It does not know yet.
    world.cut.clear()
    world.run(5.0)
    assert world.nodes["A"].machine is None


def test_an_object_that_is_away_stops_what_is_visible_and_nobody_takes_over() -> None:
    world = calm()
    world.cut.update("AB")
    world.run(TIMING.valid_s + 1)
    before = len(world.visible)
    world.run(30.0)
    assert len(world.visible) == before
    assert [who for _, who, _ in world.led] == ["A"]
    world.cut.clear()
    # Whoever asks first leads now: both have everything.
    world.run(10.0)
    assert len(world.visible) > before
    assert {by for _, _, by in world.led[1:]} <= {"log", "seat"}


def test_a_node_that_the_mandate_names_follows_nobody() -> None:
    """It was killed as the primary, and is started again as a standby. The other one
    may still think that it leads, and its copy would replace the newer state."""
    state = following.begin(TIMING, "B", empty=False)
    state, effects = following.step(state, Timer(), 0.0)
    assert effects == [ReadMandate()]
    assert following.next_deadline(state, 0.0) == math.inf
    mine = Mandate(run_id="r", holder="B", reign=3)
    state, effects = following.step(
        state, MandateRead(generation="g", mandate=mine), 0.1
    )
    assert effects == [HangUp(), TakeOver(by="log")]


def test_a_standby_dials_once_it_knows_who_leads() -> None:
    state = following.begin(TIMING, "B", empty=False)
    state, _ = following.step(state, Timer(), 0.0)
    theirs = Mandate(run_id="r", holder="A", reign=3)
    state, effects = following.step(
        state, MandateRead(generation="g", mandate=theirs), 0.1
    )
    assert effects == [Dial()]


@pytest.mark.parametrize("who", ["A", "B"])
def test_a_disk_that_is_lost_costs_nothing_while_the_other_one_is_whole(
    who: str,
) -> None:
    world = calm()
    seen = list(world.visible)
    world.crash(who, disk_lost=True)
    world.at(1.0, lambda: world.start(who, "standby"))
    world.run(60.0)
    assert {by for _, _, by in world.led} <= {"seat", "log"}
    assert world.mandate is not None
    assert world.mandate.holder != who
    assert named(world) == who
    assert set(seen) < set(world.visible)


def test_a_holder_that_lost_its_disk_gathers_if_nobody_else_can_lead() -> None:
    world = calm()
    world.crash("B")
    world.run(10.0)
    world.crash("A", disk_lost=True)
    died = world.now
    world.start("A", "standby")
    world.run(60.0)
    at, who, by = next(led for led in world.led[1:] if led[1] == "A")
    assert (who, by) == ("A", "gathering")
    assert at - died > TIMING.gathering_s - TIMING.renew_s
    assert world.mandate is not None
    assert world.mandate.reign == 2


def test_a_standby_without_room_is_not_in_step_and_the_primary_goes_on() -> None:
    world = calm()
    world.nodes["B"].full = True
    world.run(30.0)
    assert named(world) == ""
    before = len(world.visible)
    world.run(10.0)
    assert len(world.visible) > before
    world.nodes["B"].full = False
    world.run(10.0)
    assert named(world) == "B"


def test_what_the_mandate_says_of_a_lost_disk_does_not_count() -> None:
    """As the holder: it waits, and dials nobody, since no other node leads."""
    state = following.begin(TIMING, "B", empty=True)
    state, _ = following.step(state, Timer(), 0.0)
    mine = Mandate(run_id="r", holder="B", reign=3)
    state, effects = following.step(
        state, MandateRead(generation="g", mandate=mine), 0.1
    )
    assert effects == []
    assert following.next_deadline(state, 0.1) == 0.1 + TIMING.renew_s
    later = 0.1 + TIMING.renew_s
    state, effects = following.step(state, Timer(), later)
    assert effects == [ReadMandate()]
    over = replace(mine, over=True)
    _, effects = following.step(
        state, MandateRead(generation="h", mandate=over), later + 0.1
    )
    assert effects == [HangUp(), Retire()]


def test_a_primary_that_loads_shows_nothing_before_it_parts() -> None:
    """Its disk may have more than the standby's, which nobody has seen."""
    named = Mandate(run_id="r", holder="A", in_step="B")
    state, _ = primary.step(primary.seek(TIMING, "A", "r", ""), Timer(), 0.0)
    read = MandateRead(generation="1", mandate=named)
    state, effects = primary.step(state, read, 0.1)
    assert effects == [WriteMandate(mandate=named, generation="1")]
    state, effects = primary.step(state, MandateWritten(generation="2"), 0.2)
    assert effects == [Reign(number=1, gathers=False)]
    state, effects = primary.step(state, StateLoaded(), 0.3)
    parted = replace(named, in_step="")
    assert effects == [WriteMandate(mandate=parted, generation="2")]
    assert not primary.may_show(state, 0, 0.4)
    state, effects = primary.step(state, MandateWritten(generation="3"), 0.4)
    assert effects == [Release(through=0)]
    assert primary.may_show(state, 0, 0.4)
