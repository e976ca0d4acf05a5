"""Random schedules of faults: what must hold, holds, and enough happens in each; the
bounds within which a run goes on and ends."""

from unittest import mock

from msgspec.structs import replace
from plants import planted

from diloco_jax.protocol.coordinator import fragments, ledger
from diloco_jax.simulation.faults import liveness, world
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.faults import (
    APART,
    LIKELY,
    Break,
    ClockJump,
    IslandCrash,
    LongDeltas,
    Unfit,
)
from diloco_jax.simulation.faults.play import (
    CYCLES,
    check,
    play,
    play_seed,
    shortest,
)
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule, from_json

SEEDS = range(100)


def test_what_must_hold_holds() -> None:
    report = check(SEEDS)
    assert report.violations == []
    assert report.schedules == len(SEEDS)
    kinds = {fault.kind for seed in range(1000) for fault in draw(seed).faults}
    assert set(report.faults) == kinds
    assert len(kinds) == len({*LIKELY, *APART})
    assert report.merges > CYCLES * len(SEEDS)
    assert report.crashes >= report.faults["island_crash"]
    assert report.torn_snapshots > 0
    assert report.extensions > 0


def test_a_schedule_plays_the_same_every_time() -> None:
    def history(seed: int) -> tuple[object, ...]:
        world = play(draw(seed)).world
        assert world.coordinator is not None
        return world.clock.now, world.merges, world.coordinator.state

    assert history(7) == history(7)
    assert history(7) != history(8)


def test_schedules_differ_and_json_brings_them_back() -> None:
    schedules = [draw(seed) for seed in SEEDS]
    assert len({schedule.json() for schedule in schedules}) == len(SEEDS)
    assert {s.adopt for s in schedules} == {"keep", "rebase", "overwrite", "blend"}
    for schedule in schedules:
        assert len(schedule.islands) >= 3
        assert from_json(schedule.json()) == schedule


# ---- a schedule that fails becomes shorter, as long as it still fails ----


def test_only_what_makes_it_fail_is_left() -> None:
    schedule = draw(3)
    wanted = schedule.faults[2]
    short = shortest(schedule, lambda s: wanted in s.faults)
    assert short == replace(schedule, faults=(wanted,))
    assert shortest(schedule, lambda s: False) == schedule


def test_the_shortest_schedule_of_a_planted_fault_still_finds_it() -> None:
    def fails(schedule: Schedule) -> bool:
        wrong = play(schedule).wrong
        return wrong is not None and wrong.invariant == "ticks"

    with planted("ticks_are_used_again"):
        schedules = (play_seed(seed).world.schedule for seed in range(20))
        schedule = next(filter(fails, schedules))
        short = shortest(schedule, fails)
        assert fails(short)
    assert len(short.faults) < len(schedule.faults)
    assert any(hasattr(fault, "restart") for fault in short.faults), (
        "another life of a coordinator"
    )


# Some of them were over later than an earlier bound said, without a fault.
LATE = (0, 1, 2, 3, 149, 385, 553, 768, 912, 1178, 1193, 1380, 1449)


def test_without_faults_every_run_is_over_in_time() -> None:
    shares = []
    for seed in LATE:
        schedule = replace(draw(seed), faults=())
        played = play(schedule)
        assert played.wrong is None, (seed, played.wrong)
        shares.append(
            played.world.clock.now
            / liveness.over_within_s(schedule, schedule.total_tokens)
        )
    assert 0.5 < max(shares) < 1, "a bound that nothing comes near says nothing"


def test_a_run_that_never_has_its_tokens_is_a_violation() -> None:
    with mock.patch.object(ledger, "progress_tokens", return_value=0):
        wrong = play(replace(draw(0), faults=())).wrong
    assert wrong is not None
    assert wrong.invariant == liveness.NAME
    assert "is not over after" in wrong.what


def test_a_run_in_which_time_stands_still_is_a_violation() -> None:
    schedule = replace(draw(0), faults=())
    needed = play(schedule).world.clock.scheduled
    with mock.patch.object(world, "MOST_CALLS", needed):
        assert play(schedule).wrong is None
    with mock.patch.object(world, "MOST_CALLS", needed // 2):
        wrong = play(schedule).wrong
    assert wrong is not None
    assert wrong.invariant == liveness.NAME
    assert f"{needed // 2} things happened within" in wrong.what


def test_a_quorum_that_needs_an_island_in_quarantine_waits_for_its_release() -> None:
    """Without that time it would have merged too late."""
    schedule = Schedule(
        islands={
            "a": DrawnIsland(step_s=0.8, batch_size=2, join_s=0.1),
            "b": DrawnIsland(batch_size=3, join_s=1.3, lookahead=2),
            "c": DrawnIsland(join_s=1.8, lookahead=2),
            "d": DrawnIsland(batch_size=2, join_s=1.1),
        },
        faults=(
            IslandCrash(at_s=3.84, island="c", down_s=2.6, noticed=False),
            ClockJump(at_s=4.92, forward_s=16.8),
            LongDeltas(at_s=5.35, island="b", for_s=12.85, factor=100.0),
            ClockJump(at_s=6.02, forward_s=17.1),
            Unfit(at_s=7.11, island="c"),
            Break(at_s=7.31, island="c", away_s=0.0, noticed=False),
        ),
        total_tokens=2744,
        fragment_sizes=(2, 5),
        steps_per_cycle=5,
        overlap_steps=1,
        quorum=4,
        adopt="keep",
        outage_s=125.0,
        transfer_s=0.4,
        merge_s=0.0,
    )
    assert play(schedule).wrong is None
    assert liveness.released_within_s(schedule) > 0
    assert liveness.released_within_s(replace(schedule, quorum=1)) == 0
    with mock.patch.object(liveness, "released_within_s", return_value=0.0):
        wrong = play(schedule).wrong
    assert wrong is not None
    assert wrong.invariant == liveness.NAME


def test_a_fault_that_awaits_the_end_keeps_nobody_from_looking_until_then() -> None:
    at_end = ClockJump(at_s=5.0, forward_s=26.0, at_end=True)
    schedule = replace(draw(0), faults=(at_end,))
    schedule = replace(schedule, total_tokens=4 * schedule.total_tokens)
    with mock.patch.object(liveness, "PATIENCE_S", 20.0):  # A run may take longer.
        played = play(schedule)
    assert (played.wrong, played.world.struck["clock_jump"]) == (None, 1)
    assert played.world.clock.now > 20.0
    with mock.patch.object(fragments, "close_if_due", lambda turn, at, *_, **__: at):
        wrong = play(schedule).wrong
    assert wrong is not None
    assert "no merges of fragments" in wrong.what
