"""Calibration: what is fitted is what was, and it predicts other runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from virtual_recording import STANDARD, config, known, measured, record, truth

from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.simulation.calibration.command import (
    fitted,
    predict,
)
from diloco_jax.simulation.calibration.fit import calibrate, of_intervals
from diloco_jax.simulation.calibration.observed import read_timeline
from diloco_jax.simulation.calibration.steps import Gaps, steps_of


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """Of a finished run."""
    folder = tmp_path_factory.mktemp("recorded")
    record(folder)
    return folder


@pytest.fixture(scope="module")
def calibration(workdir):
    return calibrate(read_timeline(workdir))


def test_what_is_fitted_is_what_was(calibration):
    expected = dict(fitted(truth(STANDARD)))
    for what, found in fitted(calibration):
        value = expected[what].value
        assert found.low <= found.value <= found.high, what
        assert found.observed, what
        if "way" in what or "control" in what:
            # Known as intervals, or up to the messages that ended the wait.
            assert found.value == pytest.approx(value, abs=0.05), what
        else:
            assert found.value == pytest.approx(value, rel=0.02, abs=0.07), what
    assert calibration.closing_s == pytest.approx(1.0)


def test_steps_keep_their_mean_and_their_spread(calibration):
    for name, steps in calibration.steps.items():
        expected = truth(STANDARD).steps[name].seconds
        assert np.mean(steps.seconds) == pytest.approx(np.mean(expected), abs=0.003)
        assert np.std(steps.seconds) == pytest.approx(np.std(expected), rel=0.25)


@pytest.mark.parametrize(
    ("step_s", "faults"),
    [
        ({"a": 0.9, "b": 0.5, "c": 0.6}, ("c@40:kill", "coordinator@90:kill")),
        ({"a": 0.6, "b": 0.6, "c": 0.6}, ("a@30:kill", "b@50:kill", "c@90:pause3")),
        ({"a": 0.4, "b": 1.5, "c": 0.4, "new": 0.8}, ()),
    ],
)
def test_another_run_is_predicted(calibration, step_s, faults):
    other = config(step_s=step_s, faults=faults)
    for row in predict(calibration, other, 2, measured(other)):
        within = 0.02 if row.what == "goodput" or "seconds" in row.what else 0.05
        assert row.error is not None
        assert abs(row.error) < within, row


def test_kills_are_part_of_what_is_predicted(calibration):
    undisturbed = row(calibration, "goodput")
    assert row(calibration, "goodput", "a@50:kill") < undisturbed - 0.008
    goodput = row(calibration, "goodput", "coordinator@30:kill")
    assert goodput == pytest.approx(undisturbed, abs=0.01)


def test_merges_wait_until_a_coordinator_has_compiled(tmp_path):
    # Longer than the first merge waits for islands.
    recompiled_s = 4.0
    record(tmp_path / "run", recompiled_s=known(recompiled_s))
    timeline = read_timeline(tmp_path / "run")
    calibration = calibrate(timeline)
    (recovered,) = timeline.recoveries
    later = [m for m in timeline.merges if m.at > recovered.up_at]
    compiled_at = recovered.up_at + recompiled_s
    assert later[0].at == pytest.approx(compiled_at + 0.04, rel=0, abs=0.01)
    assert later[0].seconds > 0.2, "it waited"
    waited = sum(merge.seconds > 0.041 for merge in timeline.merges)
    assert calibration.merge_s.observed == len(timeline.merges) - waited


def test_merges_that_waited_for_nobody_tell_nothing_of_uploads(tmp_path):
    record(tmp_path / "run", config(step_s={"a": 0.5, "b": 0.6, "c": 3.0}, faults=()))
    timeline = read_timeline(tmp_path / "run")
    up_s = calibrate(timeline).up_s["a"]
    assert 100 < up_s.observed < len(timeline.merges) - 100
    assert up_s.high == pytest.approx(0.2, abs=0.05)


def test_compiling_shortly_before_the_end_delays_it(calibration):
    merges = round(row(calibration, "merges", "coordinator@50:kill"))
    faults = f"coordinator@{merges - 4}:kill"

    def wall_seconds(recompiled_s: float) -> float:
        fleet = dataclasses.replace(calibration, recompiled_s=known(recompiled_s))
        return row(fleet, "wall_seconds", faults)

    assert wall_seconds(20.0) == pytest.approx(wall_seconds(10.0) + 10.0, abs=0.5)


def test_an_island_is_given_up_as_diloco_run_does():
    def joins(restarts: int) -> int:
        faults = ("b@20:kill", "b#2@20:kill")
        found = measured(config(faults=faults, restarts=restarts))
        return found["islands"]["b"]["joins"]

    assert [joins(n) for n in (0, 1, 2)] == [1, 2, 3]


def test_crashes_after_ten_minutes_are_counted_anew():
    def found(*pauses: str):
        twice = ("b@20:kill", "b#2@20:kill")
        coordinator = ("coordinator@30:kill", "coordinator@50:kill")
        faults = (*twice, *coordinator, *pauses)
        return measured(config(faults=faults, restarts=1))

    # Below quorum nothing merges, so that the coordinator lives as long.
    pauses = ("b#2@10:pause600", "a@180:pause600", "c@72:pause600")
    assert found(*pauses)["islands"]["b"]["joins"] == 3
    with pytest.raises(ConfigError, match="coordinator 2 times in a row"):
        found(*(pause.replace("600", "6") for pause in pauses))


def test_a_coordinator_that_is_not_started_again_is_not_predicted():
    faults = ("coordinator@30:kill", "coordinator@50:kill", "coordinator@99999:kill")
    assert measured(config(faults=faults, restarts=2))["phase"] == "done"
    with pytest.raises(ConfigError, match=r"restarts = 1, .* coordinator 2 times"):
        measured(config(faults=faults, restarts=1))


def row(calibration, what: str, *faults: str) -> float:
    """One predicted number."""
    rows = predict(calibration, config(faults=faults), 1, None)
    return next(row.predicted for row in rows if row.what == what)


def late_lines(seed: int, lost: float) -> tuple[np.ndarray, list[Gaps]]:
    """Steps of one life, and the gaps between lines that are later than that, some of
    which are lost."""
    chance = np.random.default_rng(seed)
    seconds = 0.5 + chance.exponential(0.02, 2000)
    at = np.cumsum(seconds) + chance.exponential(0.04, len(seconds))
    told = np.flatnonzero(chance.random(len(at)) >= lost)
    return seconds, [Gaps(np.diff(told), np.diff(at[told]))]


@pytest.mark.parametrize("lost", [0.0, 0.5])
def test_the_spread_of_late_lines_is_not_that_of_steps(lost):
    def ratio(seed: int) -> float:
        seconds, gaps = late_lines(seed, lost)
        found = steps_of(gaps, median=float(np.median(seconds)), spread=True)
        assert np.median(found) == pytest.approx(np.median(seconds))
        return float(np.std(found) / np.std(seconds))

    assert np.median([ratio(seed) for seed in range(12)]) == pytest.approx(1, abs=0.1)
    _, gaps = late_lines(0, lost)
    assert np.std(gaps[0].each) > 0.03
    assert np.std(steps_of(gaps, median=0.5, spread=False)) == 0.0


def test_a_tape_of_late_lines_tells_the_spread_of_steps(tmp_path):
    record(tmp_path / "run", config(total_tokens=80_000))
    timeline = read_timeline(tmp_path / "run")
    expected = np.std(truth(STANDARD).steps["a"].seconds)

    def spread(seed: int) -> float:
        late = np.random.default_rng(seed)
        boundaries = [dict(life.boundaries) for life in timeline.lives["a"]]
        for life in timeline.lives["a"]:
            life.boundaries = {
                step: at + late.exponential(0.04)
                for step, at in life.boundaries.items()
            }
        found = float(np.std(calibrate(timeline).steps["a"].seconds))
        for life, own in zip(timeline.lives["a"], boundaries, strict=True):
            life.boundaries = own
        return found

    assert np.median([spread(s) for s in range(6)]) == pytest.approx(expected, rel=0.25)


def test_a_delay_is_in_as_many_intervals_as_any_can_be():
    fit = of_intervals([(-1.0, 0.5), (0.2, 0.9), (0.1, 0.4), (0.7, 2.0)], near=0.0)
    assert (fit.value, fit.low, fit.high) == (0.2, 0.2, 0.4)
    assert of_intervals([(-1.0, 0.5)], near=0.1).value == 0.1
    assert of_intervals([], near=0.1).value == 0.1


# ---- steps that are not emulated -------------------------------------------------


@pytest.fixture
def real(calibration):
    """Its island `a` takes what its compute takes."""
    known = calibration.steps["a"]
    plain = dataclasses.replace(known.island, step_seconds=0.0)
    steps = {**calibration.steps, "a": dataclasses.replace(known, island=plain)}
    return dataclasses.replace(calibration, steps=steps)


def test_real_steps_follow_the_batch_and_the_emulated_floor(real):
    def median(**fields) -> float:
        island = IslandConfig(**{"batch_size": 2, **fields})
        return real.step_seconds("a", STANDARD.run, island).fitted.value

    assert median(batch_size=6) == pytest.approx(3 * median())
    assert median(step_seconds=0.1) == median()
    assert median(step_seconds=5.0) == 5.0


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("a", {"remat": "full"}, "another model, sequence length or mesh"),
        ("b", {}, "emulated, and hides the compute"),
        ("d", {}, "its islands are a, b, c"),
    ],
)
def test_what_the_tape_does_not_tell_is_asked_for(real, name, fields, why):
    island = IslandConfig(batch_size=2, **fields)
    with pytest.raises(ConfigError, match=rf"islands\.{name}\.step_seconds = 0.*{why}"):
        real.step_seconds(name, STANDARD.run, island)
