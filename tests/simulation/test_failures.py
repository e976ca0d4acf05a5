"""Interruptions, stops and returning slices, second by second; data-parallel too."""

import itertools
import math

import numpy as np
import pytest

from diloco_jax.observability.measures import goodput, uptime
from diloco_jax.simulation.fleet import (
    SECONDS_PER_YEAR,
    Capacity,
    FailureModel,
    Segment,
    elastic,
    rigid,
    segments,
)

DAY_S = 86_400.0
UNDISTURBED = [Segment(0.0, math.inf, 1.0)]


class ScriptedChance:
    """Draws what it is told to, then nothing ever again."""

    def __init__(self, *waits: float) -> None:
        self.waits = list(waits)

    def exponential(self, mean: float) -> float:
        return self.waits.pop(0) if self.waits else math.inf


def life(*waits: float, slices: int = 4, **fields: float) -> list[Segment]:
    model = FailureModel(slice_chips=1, **fields)
    return list(segments(slices, model, ScriptedChance(*waits)))


WHOLE, LESS = Segment(0, 100, 1.0), Segment(100, 112, 0.0)


@pytest.mark.parametrize(
    ("waits", "slices", "expected"),
    [
        pytest.param(
            [100.0],
            4,
            [(112, 220, 0.75), (220, 232, 0.0), (232, math.inf, 1.0)],
            id="a slice less until it returns",
        ),
        pytest.param(
            [100.0, 103.0],
            4,
            [
                (112, 215, 0.75),
                (215, 227, 0.0),
                (227, 335, 0.75),
                (335, 347, 0.0),
                (347, math.inf, 1.0),
            ],
            id="the stop of another interruption takes it in",
        ),
        pytest.param(
            [100.0],
            1,
            [(112, 220, 0.0, True), (220, 232, 0.0, True), (232, math.inf, 1.0)],
            id="lost without slices",
        ),
    ],
)
def test_an_interruption_stops_the_island_and_costs_a_slice(waits, slices, expected):
    stop = LESS._replace(lost=slices == 1)
    later = [Segment(*each) for each in expected]
    assert life(*waits, slices=slices) == [WHOLE, stop, *later]


def test_no_interruptions_come_if_there_is_no_mean_time_between_them():
    rng = np.random.default_rng(0)
    assert list(segments(1e6, FailureModel(mtbi_years=0), rng)) == UNDISTURBED


def test_interruptions_come_at_the_rate_of_the_working_chips():
    """Half of them are away at a time, on average."""
    mean_s = 1000.0
    model = FailureModel(
        mtbi_years=mean_s / SECONDS_PER_YEAR,
        slice_chips=1,
        down_seconds=0,
        up_seconds=0,
        return_seconds=mean_s,
    )
    rng = np.random.default_rng(0)
    whole = itertools.takewhile(lambda s: s.start < DAY_S, segments(100, model, rng))
    days = list(whole)
    interruptions = sum(a.share > b.share for a, b in itertools.pairwise(days))
    chip_seconds = sum(100 * s.share * (s.stop - s.start) for s in days)
    assert chip_seconds == pytest.approx(100 * DAY_S / 2, rel=0.05)
    assert interruptions == pytest.approx(chip_seconds / mean_s, rel=0.05)


def test_a_life_has_no_gaps():
    rng = np.random.default_rng(1)
    pieces = list(itertools.islice(segments(150_000, FailureModel(), rng), 500))
    assert pieces[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))


def test_a_step_takes_longer_by_stops_and_missing_slices():
    capacity = Capacity(iter(life(100.0)))
    assert capacity.use(0, 10) == (10, True)
    # 5 s before the stop, 12 s of it, and 5 s of work on three of four slices.
    done, finished = capacity.use(95, 10)
    assert (done, finished) == (pytest.approx(112 + 5 / 0.75), True)
    assert capacity.active == [(0, 10), (95, 100), (112, done)]


def test_consecutive_steps_are_one_interval_of_activity():
    capacity = Capacity(iter(UNDISTURBED))
    now = 0.0
    for _ in range(1000):
        now, _ = capacity.use(now, 0.1)
    assert capacity.active == [(0.0, now)]


def test_a_step_ends_with_the_island_that_does_it():
    capacity = Capacity(iter(life(100.0, slices=1)))
    assert capacity.use(95, 10) == (100, False)
    assert capacity.back_at(100) == 232


def test_an_island_has_the_nearest_whole_number_of_slices():
    model = FailureModel(slice_chips=4096)
    assert [model.slices(chips) for chips in (4096, 10_000, 150_000)] == [1, 2, 37]


NEVER = FailureModel(mtbi_years=0)


@pytest.mark.parametrize("method", [elastic, rigid])
def test_without_interruptions_nothing_is_lost(method):
    island = method(1e6, 10.0, NEVER, DAY_S, np.random.default_rng(0))
    assert goodput([island]) == pytest.approx(1.0, abs=1e-3)
    assert uptime([island], DAY_S) == pytest.approx(1.0)


def test_rigid_loses_one_restart_for_every_step_with_an_interruption():
    model = FailureModel()
    rng = np.random.default_rng(0)
    island = rigid(1.2e6, 10.0, model, 10 * DAY_S, rng)
    interrupted = 1 - np.exp(-1.2e6 * model.interruptions_per_chip_second * 10)
    expected = 10 / (10 + interrupted * model.restart_seconds)
    assert goodput([island]) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("model", [NEVER, FailureModel()])
def test_a_step_that_the_end_cuts_off_is_no_goodput_of_rigid(model):
    for seed in range(20):
        island = rigid(1.2e6, 10.0, model, 995.0, np.random.default_rng(seed))
        assert goodput([island]) <= uptime([island], 995.0)
