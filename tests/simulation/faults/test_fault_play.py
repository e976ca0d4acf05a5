"""Random schedules of faults: what must hold, holds; and enough happens in each."""

from msgspec.structs import replace
from plants import planted

from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.faults import APART, LIKELY
from diloco_jax.simulation.faults.play import (
    CYCLES,
    check,
    play,
    play_seed,
    shortest,
)
from diloco_jax.simulation.faults.schedule import Schedule, from_json

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
