"""Faults by hand: orders of an operator, a machine that sleeps, extensions, lost disks,
and schedules that once violated an invariant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from diloco_jax.config import ConfigError
from diloco_jax.coordinator.lead import AnyEffect
from diloco_jax.protocol.coordinator import ending, ledger
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.protocol.island.boundary import Boundary
from diloco_jax.protocol.messages import Version
from diloco_jax.simulation.faults import draw, liveness
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.faults import (
    LEASE_S,
    AnyFault,
    CoordinatorCrash,
    Corruption,
    Delay,
    DiskFailure,
    DiskGone,
    DiskLost,
    Export,
    Impostor,
    IslandCrash,
    JoinCrash,
    Leave,
    MachineSleep,
    MadeUpAnchors,
    Partition,
    Replacement,
    Restart,
    RunStop,
    SecondCoordinator,
    TornWrite,
    WorkerCrash,
)
from diloco_jax.simulation.faults.play import play, play_seed
from diloco_jax.simulation.faults.schedule import (
    MOST_STEPS,
    RESTART_S,
    DrawnIsland,
    Schedule,
    from_json,
)
from diloco_jax.simulation.faults.unit import Unit
from diloco_jax.simulation.faults.world import FaultyWorld

TWO = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland(step_s=1.5)},
    total_tokens=800,
    outage_s=110.0,
)
EQUAL = Schedule(
    islands={"a": DrawnIsland(), "b": DrawnIsland()},
    total_tokens=600,
    fragment_sizes=(1,),
)
"""Merges are at about 5, 10, ... seconds."""
RESTART = Restart(down_s=0.5)


def played(schedule: Schedule, *faults: AnyFault, **fields: Any) -> FaultyWorld:
    """With nothing wrong, and with all faults."""
    world, wrong = play(replace(schedule, faults=faults, **fields))
    assert wrong is None
    assert world.struck.total() == len(faults)
    return world


def state_of(world: FaultyWorld) -> State:
    assert world.coordinator is not None
    return world.coordinator.state


def incarnations(world: FaultyWorld) -> set[int]:
    return {island.incarnation for island in world.islands.values()}


# ---- an operator, and a machine that sleeps ----

AT_S, FOR_S = 9.0, 6.0
ASLEEP_S = 3 * LEASE_S
STOP = RunStop(at_s=AT_S, for_s=FOR_S)
Done = list[tuple[float, AnyEffect]]


@pytest.fixture
def done() -> Iterator[Done]:
    """The effects that are carried out, with their times."""
    effects: Done = []
    carry_out = FaultyCoordinator.carry_out

    def noting(coordinator: FaultyCoordinator, effect: AnyEffect) -> None:
        effects.append((coordinator.clock.now, effect))
        carry_out(coordinator, effect)

    with mock.patch.object(FaultyCoordinator, "carry_out", noting):
        yield effects


def test_an_export_keeps_every_fragment_once(done: Done) -> None:
    def kept() -> list[tuple[int, int]]:
        found = [effect for _, effect in done if isinstance(effect, KeepFragment)]
        done.clear()
        return [(keep.cycle, keep.fragment) for keep in found]

    before = played(TWO)
    usual = kept()
    played(TWO, Export(at_s=11.5))  # In a cycle that is not kept anyway.
    now = kept()
    assert len(now) == len(set(now)) > len(set(usual))
    assert {f for _, f in now} == set(range(before.config.fragments))


def test_a_run_that_is_stopped_and_resumed_ends_with_its_tokens() -> None:
    world = played(TWO, STOP)
    assert incarnations(world) == {2}
    state = state_of(world)
    for name in state.islands:
        lost = [fragment.accounts[name].lost_tokens for fragment in state.fragments]
        assert any("stopped" in reasons for reasons in lost)
    assert world.clock.now > played(TWO).clock.now + FOR_S


@pytest.mark.parametrize(
    "fault",
    [
        *(
            CoordinatorCrash(
                at_s=AT_S + FOR_S / 2, effects=effects, restart=Restart(down_s=1.0)
            )
            for effects in range(5)
        ),
        DiskFailure(at_s=AT_S + FOR_S / 2, appends=1, restart=Restart(down_s=1.0)),
    ],
)
def test_it_survives_a_fault_as_it_is_resumed(fault: AnyFault) -> None:
    played(TWO, STOP, fault)


def assert_all_stayed(world: FaultyWorld) -> None:
    """No island began again or lost a token."""
    state = state_of(world)
    assert {island.incarnation for island in state.islands.values()} == {1}
    lost = [a.lost_tokens for f in state.fragments for a in f.accounts.values()]
    assert not any(lost)


@pytest.mark.parametrize("for_s", [LEASE_S / 2, ASLEEP_S])
def test_nothing_is_done_or_lost_meanwhile(for_s: float, done: Done) -> None:
    world = played(TWO, MachineSleep(at_s=AT_S, for_s=for_s))
    assert not [at_s for at_s, _ in done if AT_S < at_s < AT_S + for_s]
    assert_all_stayed(world)
    awake = played(TWO).coordinator
    assert awake is not None
    assert world.coordinator is not None
    slept_s = awake.clock_offset - world.coordinator.clock_offset
    assert slept_s == for_s, "its clock stood still"


def test_it_sleeps_at_the_end_of_the_run() -> None:
    world = played(TWO, MachineSleep(at_s=0.0, for_s=ASLEEP_S, at_end=True))
    assert world.clock.now > played(TWO).clock.now + ASLEEP_S / 2
    assert_all_stayed(world)


def test_its_power_fails_while_it_sleeps() -> None:
    lost = DiskLost(at_s=AT_S + 1, restart=Restart(down_s=1.0))
    world = played(TWO, MachineSleep(at_s=AT_S, for_s=ASLEEP_S), lost)
    assert state_of(world).term == 2


# ---- a run that is over goes on to more tokens ----

FIRST, MORE = 800, 2000
EXTENDED = replace(TWO, extended_to=(MORE,))
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "workers": {"workers": 2, "fragment_sizes": (2, 1, 1, 2)},
}


def tokens(world: FaultyWorld) -> int:
    return state_of(world).progress_tokens


@pytest.mark.parametrize("beside", BESIDE)
def test_a_run_that_is_over_goes_on(beside: str) -> None:
    once = played(TWO, **BESIDE[beside])
    assert FIRST <= tokens(once) < MORE
    world = played(EXTENDED, **BESIDE[beside])
    assert tokens(world) >= MORE
    assert world.extensions == 1
    assert all(n > of for n, of in zip(world.merges, once.merges, strict=True))
    assert incarnations(world) == {2}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("effects", [0, 1, 2, 5])
def test_a_kill_as_it_is_extended_costs_nothing(beside: str, effects: int) -> None:
    schedule = replace(EXTENDED, **BESIDE[beside])
    over_s = played(schedule, extended_to=()).clock.now
    crash = CoordinatorCrash(
        at_s=over_s + RESTART_S / 2, effects=effects, restart=Restart(down_s=1.0)
    )
    world = played(schedule, crash)
    assert world.struck == {"coordinator_crash": 1}
    assert tokens(world) >= MORE


def test_what_a_run_has_already_extends_nothing() -> None:
    world = played(TWO, extended_to=(FIRST,))
    assert world.extensions == 0
    again = played(TWO, extended_to=(MORE, FIRST, 2 * MORE))
    assert again.extensions == 2


def test_a_run_that_was_over_too_soon_is_extended_until_enough_happened() -> None:
    """Its schedule then plays the same."""
    losing = (seed for seed in range(100) if draw.draw(seed).rule.loses_steps)
    with mock.patch.object(draw, "LOSING_SHARE", 0.05):
        one = play_seed(next(losing))
    assert one.wrong is None
    assert one.is_full
    assert one.world.extensions == len(one.world.schedule.extended_to) > 0
    again = play(from_json(one.world.schedule.json()))
    assert again.world.clock.now == one.world.clock.now
    assert again.world.merges == one.world.merges


def test_an_extension_that_gives_data_again_is_found() -> None:
    real = ending.extended

    def anew(state: State) -> State:
        return replace(real(state), next_position=0)

    with mock.patch.object(ending, "extended", anew):
        wrong = play(EXTENDED).wrong
    assert wrong is not None
    assert wrong.invariant == "data"


def test_a_run_that_is_not_over_after_its_extension_is_a_violation() -> None:
    once_s = played(TWO).clock.now
    then_s = played(EXTENDED).clock.now - once_s
    assert then_s > once_s, "a bound between them is one for the extension alone"
    for within_s, found in ((then_s + 1.0, False), (then_s - 2.0, True)):
        with mock.patch.object(liveness, "over_within_s", return_value=within_s):
            wrong = play(EXTENDED).wrong
        assert (wrong is not None) == found
        assert wrong is None or "is not over" in wrong.what


def test_an_extension_that_takes_too_long_is_refused() -> None:
    longest = int(MOST_STEPS * EXTENDED.tokens_per_s)
    text = json.loads(replace(EXTENDED, extended_to=(longest,)).json())
    with pytest.raises(ConfigError, match="lower total_tokens or extended_to"):
        from_json(json.dumps(text))


# ---- a disk that is gone: a new term, from what islands have ----


def versions(world: FaultyWorld) -> list[Version]:
    return [f.version for f in state_of(world).fragments]


def terms(world: FaultyWorld) -> set[int]:
    return {version.term for version in versions(world)}


def test_a_disk_that_is_lost_costs_a_term_and_no_version() -> None:
    world = played(EQUAL, DiskLost(at_s=21.0, restart=RESTART), fragment_sizes=(2, 1))
    unharmed = played(EQUAL, fragment_sizes=(2, 1))
    assert terms(world) == {2}
    for found, expected in zip(versions(world), versions(unharmed), strict=True):
        assert expected.term == 1
        assert found.number >= expected.number - 2
    totals = ledger.run_totals(world.config, state_of(world))
    assert totals.carried > 0
    assert totals.in_flight <= 1, "what is left of rounding down"
    assert totals.lost == {}
    assert incarnations(world) == {1}


def test_a_disk_that_is_back_in_time_is_gone_on_with() -> None:
    soon = DiskGone(at_s=21.0, restart=RESTART, gone_s=0.3)
    assert terms(played(EQUAL, soon)) == {1}
    late = DiskGone(at_s=21.0, restart=RESTART, gone_s=20.0)
    assert terms(played(EQUAL, late)) == {2}
    twice = [DiskLost(at_s=at_s, restart=RESTART) for at_s in (15.0, 30.0)]
    assert terms(played(EQUAL, *twice)) == {3}


@pytest.mark.parametrize(
    ("names", "liar"), [(names, n) for names in ("abc", "abcd") for n in names]
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_liar_at_any_place_gives_the_term_nothing(
    names: str, liar: str, ahead: int
) -> None:
    """Not even one that claims the newest version."""
    islands = {name: DrawnIsland() for name in names}
    lies = MadeUpAnchors(at_s=20.5, island=liar, for_s=90, ahead=ahead)
    lost = DiskLost(at_s=21.0, restart=RESTART)
    world = played(
        EQUAL, lies, lost, islands=islands, total_tokens=1600, outage_s=110.0
    )
    assert terms(world) == {2}


def test_a_liar_that_two_cannot_check_is_stopped_by_an_operator() -> None:
    """They differ at one version, and wait for a third island."""
    lies = MadeUpAnchors(at_s=20.5, island="a", for_s=90)
    world = played(EQUAL, lies, DiskLost(at_s=21.0, restart=RESTART), total_tokens=1600)
    assert terms(world) == {2}


@pytest.mark.parametrize(("for_s", "term"), [(1.0, 1), (12.0, 2), (40.0, 2)])
def test_the_first_of_two_coordinators_goes_on_only_if_it_is_back_in_time(
    for_s: float, term: int
) -> None:
    """Otherwise islands tell it of the second one's term, and it ends."""
    islands = {name: DrawnIsland() for name in "abc"}
    second = SecondCoordinator(at_s=20.5, for_s=for_s)
    with mock.patch.object(Unit, "crash") as crash:
        world = played(EQUAL, second, islands=islands, total_tokens=1600)
    assert terms(world) == {term}
    assert world.first is None
    assert not crash.called
    assert incarnations(world) == {1}


def test_one_island_is_enough() -> None:
    crash = IslandCrash(at_s=20.5, island="b", down_s=15.0)
    world = played(EQUAL, crash, DiskLost(at_s=21.0, restart=RESTART))
    assert versions(world)[0].term == 2
    assert versions(world)[0].number > 3


def test_a_process_of_the_same_name_that_is_first_in_the_new_term_has_it() -> None:
    """An incarnation from before is turned away, and the next one comes back. Until it
    hears so, it trains on positions that the term before had granted it."""
    crash = Restart(down_s=0.2, clock_s=6.4, noticed_s=4.0)
    world = played(
        EQUAL,
        DiskLost(at_s=2.39, restart=Restart(down_s=7.62, clock_s=0.9, noticed_s=0.0)),
        TornWrite(at_s=9.46, restart=crash, appends=1, written_share=0.17),
        Impostor(at_s=15.83, island="b"),
        **UNALIKE,
    )
    assert terms(world) == {2}
    assert world.islands["b"].incarnation == 2


UNALIKE: dict[str, Any] = {
    "islands": {
        "a": DrawnIsland(step_s=1.5, batch_size=2, join_s=1.2),
        "b": DrawnIsland(step_s=2.5, batch_size=3, join_s=1.4),
    },
    "total_tokens": 129,
    "fragment_sizes": (3,),
    "overlap_steps": 1,
    "outage_s": 110.0,
}
DEAF = Partition(at_s=5.6, island="b", for_s=3.0, ways=("down",))
"""b does not hear that its first delta is merged, and a has adopted that merge."""
THEN_LOST = DiskLost(at_s=7.2, restart=RESTART)


def test_a_take_without_a_verdict_is_not_merged_again() -> None:
    world = played(EQUAL, DEAF, THEN_LOST, quorum=2)
    assert terms(world) == {2}


def test_it_would_be_if_an_island_opened_it_again() -> None:
    begin_term = Boundary._begin_term

    def reopens(boundary: Any, step: int) -> None:
        books = boundary.books
        takes = [
            t for t in books.outstanding() if books._accounts[t.fragment].unsettled
        ]
        begin_term(boundary, step)
        for take in takes:
            boundary._arrays.judge(take.fragment, "reopened")
            account = books._accounts[take.fragment]
            account.start, account.unsettled = take.start, False
            books._new = [
                replace(record, start=take.start)
                if (record.kind, record.fragment) == ("carried", take.fragment)
                else record
                for record in books._new
            ]

    with mock.patch.object(Boundary, "_begin_term", reopens):
        wrong = play(replace(EQUAL, faults=(DEAF, THEN_LOST), quorum=2)).wrong
    assert wrong is not None
    assert wrong.invariant == "merged_once"


def test_what_a_term_granted_that_nobody_heard_of_is_lost_with_it() -> None:
    """b joins the first term 2 alone, and its welcome gets lost with the disk. So the
    next one is term 2 again, grants the same data, and b begins anew in it."""
    world = played(
        EQUAL,
        DiskLost(at_s=4.47, restart=Restart(down_s=0.12, noticed_s=4.0)),
        DiskGone(at_s=6.4, restart=Restart(down_s=1.59, noticed_s=4.0), gone_s=4.51),
        TornWrite(at_s=8.67, restart=Restart(down_s=7.18), appends=2),
        DiskFailure(at_s=21.67, restart=Restart(down_s=2.78), appends=2, written=True),
        Leave(at_s=22.86, island="b", away_s=1.58, notice_s=3.0),
        Replacement(at_s=26.18, island="c"),
        DiskLost(at_s=31.9, restart=Restart(down_s=2.65)),
        islands={
            "a": DrawnIsland(step_s=1.5, batch_size=2, join_s=1.5, lookahead=2),
            "b": DrawnIsland(join_s=0.7),
            "c": DrawnIsland(step_s=1.5, batch_size=2, join_s=1.6),
        },
        total_tokens=192,
        fragment_sizes=(7,),
        steps_per_cycle=5,
        overlap_steps=1,
        outage_s=125.0,
        transfer_s=1.2,
    )
    assert world.struck["disk_lost"] == 2
    assert terms(world) == {2}


def test_one_of_the_same_name_in_a_lost_term_takes_no_data_from_the_other() -> None:
    """The second process that calls itself b is let into term 2, which is lost. In the
    third the first b is back, with what the first term had granted it."""
    world = played(
        EQUAL,
        DiskLost(at_s=1.19, restart=Restart(down_s=0.13, clock_s=1985.4)),
        TornWrite(
            at_s=2.64, restart=Restart(down_s=6.08), appends=1, written_share=0.6
        ),
        Impostor(at_s=7.01, island="b"),
        CoordinatorCrash(at_s=7.42, restart=Restart(down_s=4.85), effects=1),
        DiskLost(at_s=10.69, restart=Restart(down_s=1.89)),
        islands={
            "a": DrawnIsland(step_s=1.0, batch_size=2, join_s=1.5),
            "b": DrawnIsland(step_s=1.0, batch_size=2, join_s=1.3),
        },
        total_tokens=1,
        fragment_sizes=(5,),
        steps_per_cycle=3,
        overlap_steps=1,
        outage_s=110.0,
    )
    assert terms(world) == {3}
    assert world.islands["b"].incarnation == 1


def test_one_of_the_same_name_in_a_later_term_begins_anew() -> None:
    """Seed 204319: the second process that calls itself b is let into term 3, of whose
    beginning a torn record knows nothing, and its steps are others than the first's."""
    world = played(
        EQUAL,
        DiskLost(at_s=6.83, restart=Restart(down_s=2.72, clock_s=5.2, noticed_s=4.0)),
        DiskLost(at_s=35.73, restart=Restart(down_s=2.78, clock_s=2.5, noticed_s=4.0)),
        TornWrite(
            at_s=36.74,
            restart=Restart(down_s=1.63, clock_s=5.6, noticed_s=4.0),
            written_share=0.41,
        ),
        Impostor(at_s=42.47, island="b"),
        islands={
            "b": DrawnIsland(batch_size=2, join_s=0.7),
            "c": DrawnIsland(batch_size=2, join_s=0.1),
        },
        total_tokens=776,
        fragment_sizes=(2,),
        room=2,
        steps_per_cycle=6,
        max_staleness=2,
        adopt="overwrite",
        outage_s=110.0,
    )
    assert terms(world) == {3}


# ---- schedules that once violated an invariant, as short as they get ----

FOUND = {
    "the end costs steps: a crash amid effects": Schedule(
        islands={
            "a": DrawnIsland(join_s=0.1, lookahead=2),
            "c": DrawnIsland(join_s=0.4),
        },
        faults=(
            JoinCrash(at_s=0.43, island="a", down_s=2.2, joining_s=0.39),
            CoordinatorCrash(
                at_s=1.32, restart=Restart(down_s=3.76, clock_s=1570.7), effects=8
            ),
            WorkerCrash(at_s=3.83, worker=1, down_s=0.14, effects=7),
            CoordinatorCrash(
                at_s=6.74, restart=Restart(down_s=11.02, clock_s=2831.0), effects=3
            ),
            DiskFailure(
                at_s=7.14,
                restart=Restart(down_s=1.93, clock_s=2.0, noticed_s=4.0),
                appends=2,
                written=True,
            ),
            CoordinatorCrash(
                at_s=9.13, restart=Restart(down_s=2.48, clock_s=1868.1, noticed_s=4.0)
            ),
        ),
        total_tokens=207,
        fragment_sizes=(6,),
        room=1,
        steps_per_cycle=3,
        max_staleness=2,
        outage_s=110.0,
        transfer_s=0.4,
    ),
    "the end costs steps: it comes before all are in the term": Schedule(
        islands={
            "a": DrawnIsland(step_s=0.8, batch_size=2, join_s=1.3),
            "b": DrawnIsland(step_s=0.8, batch_size=2, join_s=0.5),
            "c": DrawnIsland(step_s=2.5, batch_size=2, join_s=0.8),
        },
        faults=(
            JoinCrash(at_s=2.33, island="c", down_s=2.05, joining_s=1.92),
            DiskLost(at_s=5.76, restart=Restart(down_s=0.16, clock_s=4.8)),
            WorkerCrash(at_s=8.66, worker=0, down_s=0.13, noticed_s=0.3, effects=7),
            Delay(at_s=15.24, island="a", for_s=0.91, late_s=1.2),
        ),
        total_tokens=188,
        adopt="overwrite",
        transfer_s=0.4,
    ),
    "two processes come under one name while the coordinator is away": Schedule(
        islands={"c": DrawnIsland(batch_size=2, join_s=0.4)},
        faults=(
            JoinCrash(at_s=5.97, island="c", down_s=0.49, joining_s=1.19),
            DiskFailure(
                at_s=8.15,
                restart=Restart(down_s=2.37, clock_s=3.8, noticed_s=4.0),
                appends=1,
            ),
            Impostor(at_s=8.49, island="c"),
            Impostor(at_s=10.03, island="c"),
        ),
        total_tokens=85,
        fragment_sizes=(7,),
        workers=3,
        steps_per_cycle=3,
        overlap_steps=1,
        max_staleness=0,
        outage_s=125.0,
    ),
    "the last fault ends while all processes start again (seed 121726)": Schedule(
        islands={
            "a": DrawnIsland(join_s=0.4),
            "b": DrawnIsland(step_s=2.5, batch_size=3, join_s=0.6, lookahead=2),
            "c": DrawnIsland(step_s=1.5, batch_size=2, join_s=0.2),
        },
        faults=(
            IslandCrash(
                at_s=5.52, island="c", down_s=6.04, noticed=False, lingers=True
            ),
            DiskLost(
                at_s=9.09, restart=Restart(down_s=0.16, clock_s=1928.2, noticed_s=4.0)
            ),
        ),
        total_tokens=370,
        extended_to=(633,),
        fragment_sizes=(2,),
        steps_per_cycle=3,
        overlap_steps=1,
        max_staleness=0,
        adopt="overwrite",
        outage_s=110.0,
    ),
    "one island alone has a term's lost anchor (seed 452)": Schedule(
        islands={
            "a": DrawnIsland(step_s=1.5, batch_size=3, join_s=0.2, lookahead=2),
            "b": DrawnIsland(step_s=2.5, join_s=1.8, lookahead=2),
            "c": DrawnIsland(step_s=2.5, join_s=0.3, lookahead=2),
            "d": DrawnIsland(join_s=0.7),
        },
        faults=(
            DiskLost(at_s=10.97, restart=Restart(down_s=2.36, clock_s=4197.4)),
            DiskGone(
                at_s=11.41,
                restart=Restart(down_s=2.43, clock_s=4116.4, noticed_s=4.0),
                gone_s=3.32,
            ),
            IslandCrash(at_s=16.92, island="d", down_s=3.45),
            WorkerCrash(
                at_s=22.03,
                worker=0,
                down_s=4.83,
                effects=11,
                disk_lost=True,
            ),
        ),
        total_tokens=418,
        fragment_sizes=(7, 7, 9),
        workers=3,
        room=1,
        steps_per_cycle=3,
        overlap_steps=1,
        quorum=4,
        max_staleness=0,
        transfer_s=1.2,
    ),
    "two islands have not adopted in a term that is lost (seed 911)": Schedule(
        islands={
            "a": DrawnIsland(join_s=0.2, lookahead=2),
            "b": DrawnIsland(step_s=0.8, batch_size=2, join_s=0.6, lookahead=2),
            "c": DrawnIsland(batch_size=3, join_s=1.5, lookahead=2),
        },
        faults=(
            DiskLost(
                at_s=0.86, restart=Restart(down_s=2.72, clock_s=2066.3, noticed_s=4.0)
            ),
            WorkerCrash(at_s=1.82, worker=0, down_s=2.42, noticed_s=0.05, effects=2),
            WorkerCrash(
                at_s=3.6,
                worker=2,
                down_s=0.11,
                noticed_s=0.3,
                effects=10,
                disk_lost=True,
            ),
            Partition(at_s=12.35, island="b", ways=("up",), for_s=6.57),
            Corruption(at_s=12.88, island="c", for_s=3.81),
        ),
        total_tokens=170,
        fragment_sizes=(3,),
        workers=2,
        room=1,
        steps_per_cycle=5,
        overlap_steps=1,
        max_staleness=2,
        outage_s=110.0,
    ),
    "two islands adopted another fragment of a term (seed 954)": Schedule(
        islands={
            "b": DrawnIsland(batch_size=2, join_s=1.2),
            "c": DrawnIsland(step_s=2.5, batch_size=2, join_s=0.9),
            "d": DrawnIsland(step_s=0.8, join_s=0.9),
        },
        faults=(
            DiskGone(at_s=0.83, restart=Restart(down_s=5.54, clock_s=7.9), gone_s=9.44),
            WorkerCrash(at_s=1.29, worker=1, down_s=0.18, noticed_s=0.05, effects=10),
            JoinCrash(at_s=4.6, island="b", down_s=2.04, joining_s=1.39),
            DiskLost(
                at_s=8.62, restart=Restart(down_s=2.28, clock_s=775.8, noticed_s=4.0)
            ),
            WorkerCrash(
                at_s=11.83,
                worker=0,
                down_s=8.7,
                noticed_s=0.3,
                effects=10,
                disk_lost=True,
            ),
        ),
        total_tokens=303,
        fragment_sizes=(5, 9, 7),
        workers=2,
        steps_per_cycle=5,
        overlap_steps=1,
        max_staleness=0,
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found_once_holds(found: str) -> None:
    assert play(FOUND[found]).wrong is None
