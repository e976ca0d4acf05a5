"""A schedule that fails becomes shorter, as long as it still fails."""

from plants import planted

from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.play import PLAYS, play, play_seed, shortest
from diloco_jax.simulation.faults.schedule import Schedule


def test_only_what_makes_it_fail_is_left() -> None:
    schedule = draw(3)
    wanted = schedule.faults[2]
    short = shortest(schedule, lambda s: wanted in s.faults)
    assert short.faults == (wanted,)
    assert len(short.islands) == 1
    assert short.total_tokens < schedule.total_tokens
    assert (short.quorum, len(short.fragment_sizes)) == (1, 1)


def test_it_does_not_try_for_ever() -> None:
    tried: list[Schedule] = []

    def never(schedule: Schedule) -> bool:
        tried.append(schedule)
        return False

    schedule = draw(3)
    assert shortest(schedule, never) == schedule
    assert 0 < len(tried) <= PLAYS


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
