"""The bounds within which a run goes on and ends: reached by none, and not far off."""

from unittest import mock

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import fragments, ledger
from diloco_jax.simulation.faults import liveness, world
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.faults import (
    Break,
    ClockJump,
    IslandCrash,
    LongDeltas,
    Unfit,
)
from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import DrawnIsland, Schedule

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
