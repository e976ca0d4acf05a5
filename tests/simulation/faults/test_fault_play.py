"""Random schedules of faults: what must hold, holds; and enough happens in each."""

from collections import Counter

import pytest

from diloco_jax.simulation.faults.draw import FAULTS, draw
from diloco_jax.simulation.faults.faults import APART, LIKELY
from diloco_jax.simulation.faults.play import CYCLES, check, play, play_seed

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


@pytest.mark.parametrize("seed", range(20))
def test_enough_happens_in_every_schedule(seed: int) -> None:
    world = play_seed(seed).world
    assert len(world.islands) >= 3
    assert min(world.merges) >= CYCLES
    assert world.struck.total() >= FAULTS


def test_a_schedule_plays_the_same_every_time() -> None:
    def history(seed: int) -> tuple[object, ...]:
        world = play(draw(seed)).world
        assert world.coordinator is not None
        return world.clock.now, world.merges, world.coordinator.state

    assert history(7) == history(7)
    assert history(7) != history(8)


def test_schedules_differ() -> None:
    schedules = [draw(seed) for seed in SEEDS]
    assert len({schedule.json() for schedule in schedules}) == len(SEEDS)
    assert Counter(s.adopt for s in schedules).keys() == {
        "keep",
        "rebase",
        "overwrite",
        "blend",
    }
