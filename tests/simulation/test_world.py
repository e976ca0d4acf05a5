"""Islands in virtual time: they join, train, are merged, die, come back."""

import itertools

import numpy as np
import pytest

from diloco_jax.config import Placement, RunConfig, SyncConfig
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.simulation.clock import DRAWN_AT_ONCE, Clock, Line, LineSpeed, durations
from diloco_jax.simulation.coordinator import NoArrays, World
from diloco_jax.simulation.island import IslandSpec

BATCH, LENGTH = 8, 128
PER_STEP = BATCH * LENGTH


def make_world(total_tokens: int, **sync) -> World:
    settings = {"steps_per_cycle": 4, "overlap_steps": 2, "fragments": 2, **sync}
    run = RunConfig(
        sequence_length=LENGTH,
        total_tokens=total_tokens,
        sync=SyncConfig(**{"grace": 0.0, **settings}),
    )
    config = policy_config(run, Placement(), "run", (30, 10))
    merging = NoArrays((100, 100), (400, 400))
    speed = LineSpeed(latency_s=0.05, up_bytes_per_s=1000, down_bytes_per_s=1000)
    return World(run, config, merging, report_s=6.0, line_speed=speed)


def spec(name: str, step_seconds: float = 1.0, lookahead: int = 0) -> IslandSpec:
    return IslandSpec(
        name=name,
        batch_size=BATCH,
        step_seconds=lambda step: step_seconds,
        join_seconds=2.0,
        bytes_up=(100, 100),
        lookahead=lookahead,
    )


def totals(world: World) -> ledger.Totals:
    coordinator = world.coordinator
    assert ledger.check(coordinator.state) == []
    return ledger.run_totals(coordinator.config, coordinator.state)


def test_a_run_ends_with_every_token_merged() -> None:
    world = make_world(100 * PER_STEP)
    world.start(spec("a"))
    world.start(spec("b", 2.0))
    world.run(1000)
    assert world.coordinator.finished
    end = totals(world)
    assert end.computed == end.merged >= 100 * PER_STEP
    # Two steps of "a" come on one of "b".
    a, b = world.islands["a"].steps, world.islands["b"].steps
    assert a == pytest.approx(2 * b, abs=3)


def test_a_step_takes_its_seconds_and_never_waits_for_the_network() -> None:
    world = make_world(10**9)
    world.start(spec("a"))
    world.run(102.0)
    # Hello, welcome and fetch take 0.2 s + 0.8 s, of which the compilation hides one.
    assert world.islands["a"].steps in (98, 99)


@pytest.mark.parametrize("seconds", [1.0, 1.1])
def test_an_island_whose_hosts_agree_first_is_merged_with_the_others(
    seconds: float,
) -> None:
    world = make_world(400 * PER_STEP, grace=0.8, steps_per_cycle=12)
    world.start(spec("a"))
    world.start(spec("b", seconds, lookahead=2))
    world.run(1000)
    assert world.coordinator.finished
    assert totals(world).computed == totals(world).merged
    for name, account in world.coordinator.state.fragments[0].accounts.items():
        assert account.merges_in >= 0.9 * account.merges_alive, name


def test_a_clock_can_stop_where_time_stands_still() -> None:
    clock, times = Clock(), list[float]()

    def again() -> None:
        times.append(clock.now)
        clock.after(0.0, again)

    clock.after(1.0, again)
    clock.run(until=5.0, most=3)
    assert times == [1.0] * 3
    assert clock.now == 1.0, "more is due by then"
    assert clock.scheduled == 4


@pytest.mark.parametrize("direction", ["upload", "download"])
def test_transfers_in_one_direction_come_one_after_the_other(direction: str) -> None:
    clock, arrived = Clock(), []
    line = Line(clock, LineSpeed(up_bytes_per_s=100, down_bytes_per_s=100))
    for _ in range(2):
        getattr(line, direction)(100, lambda: arrived.append(clock.now))
    clock.run()
    assert arrived == [1.0, 2.0]


def test_an_island_that_lost_its_line_trains_on_and_is_merged_after() -> None:
    world = make_world(200 * PER_STEP)
    world.start(spec("a"))
    island = world.start(spec("b"))

    def cut() -> None:
        island.disconnect()
        assert island.peer is not None
        world.coordinator.disconnected(island.peer)

    def again() -> None:
        island.connect(world.coordinator, Line(world.clock, LineSpeed()))

    world.clock.at(40.5, cut)
    world.clock.at(70.5, again)
    world.run(1000)
    assert world.coordinator.finished
    assert island.incarnation == 1
    end = totals(world)
    assert end.merged == end.computed


def test_steps_have_the_mean_and_spread_that_were_asked_for():
    steps = durations(10.0, 0.0, np.random.default_rng(0))
    assert set(itertools.islice(steps, 2 * DRAWN_AT_ONCE)) == {10.0}
    spread = durations(10.0, 0.1, np.random.default_rng(0))
    seconds = np.array(list(itertools.islice(spread, 100_000)))
    assert seconds.mean() == pytest.approx(10.0, rel=0.002)
    assert seconds.std() == pytest.approx(1.0, rel=0.02)
    assert seconds.min() > 0
