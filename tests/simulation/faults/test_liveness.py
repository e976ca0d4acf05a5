"""The bounds within which a run goes on and ends: reached by none, and not far off."""

from unittest import mock

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import fragments, ledger
from diloco_jax.simulation.faults import liveness, world
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.faults import ClockJump
from diloco_jax.simulation.faults.play import play

# Some of them were over later than an earlier bound said, without a fault.
SEEDS = (0, 1, 2, 3, 149, 385, 553, 768, 912, 1178, 1193, 1380, 1449)


def test_without_faults_every_run_is_over_in_time() -> None:
    shares = []
    for seed in SEEDS:
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
    """Seed 5948: without that time it would have merged too late."""
    schedule = draw(5948)
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
    played = play(schedule)
    assert (played.wrong, played.world.struck["clock_jump"]) == (None, 1)
    with mock.patch.object(fragments, "settle", lambda turn, at, *_, **__: at):
        wrong = play(schedule).wrong
    assert wrong is not None
    assert "no merges of fragments" in wrong.what


def test_a_run_that_takes_long_to_its_end_may_have_a_fault_there() -> None:
    at_end = ClockJump(at_s=5.0, forward_s=26.0, at_end=True)
    schedule = replace(draw(0), faults=(at_end,))
    schedule = replace(schedule, total_tokens=4 * schedule.total_tokens)
    with mock.patch.object(liveness, "PATIENCE_S", 20.0):
        played = play(schedule)
    assert played.wrong is None
    assert played.world.clock.now > 20.0
    assert played.world.struck["clock_jump"] == 1
