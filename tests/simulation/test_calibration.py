"""Calibration: what is fitted is what was, and it predicts other runs."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from virtual_recording import STANDARD, config, measured, record, truth

from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.simulation.calibration.command import predict
from diloco_jax.simulation.calibration.fit import Steps, calibrate


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """Workdir of a finished run."""
    folder = tmp_path_factory.mktemp("recorded")
    record(folder)
    return folder


@pytest.fixture(scope="module")
def calibration(workdir):
    return calibrate(workdir)


def test_what_is_fitted_is_what_was(calibration):
    expected = dict(truth(STANDARD).fitted())
    # The step in which an island dies is part of its absence.
    expected["away_s"] = dataclasses.replace(expected["away_s"], value=8.0 + 0.7)
    assert dict(calibration.fitted()).keys() == expected.keys()
    for what, found in calibration.fitted():
        assert found.low <= found.value <= found.high, what
        assert found.observed, what
        value = expected[what].value
        assert found.value == pytest.approx(value, rel=0.02, abs=0.07), what


def test_steps_keep_their_median_and_their_mean(calibration):
    for name, true in truth(STANDARD).steps.items():
        found = calibration.steps[name]
        assert found.median == pytest.approx(true.median, abs=0.004)
        assert found.tail == pytest.approx(true.tail, abs=0.006)


def test_steps_are_drawn_with_their_median_and_their_mean():
    drawn = Steps(0.5, 0.02).draw(np.random.default_rng(0))
    seconds = [*itertools.islice(drawn, 20_000)]
    assert np.median(seconds) == pytest.approx(0.5, abs=0.001)
    assert np.mean(seconds) == pytest.approx(0.5 + 0.02 * (1 - np.log(2)), abs=0.001)
    assert next(Steps(0.5, 0.0).draw(np.random.default_rng(0))) == 0.5


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


def test_merges_that_waited_for_nobody_tell_nothing_of_transfers(tmp_path):
    record(tmp_path / "run", config(step_s={"a": 0.5, "b": 0.6, "c": 3.0}, faults=()))
    transfer_s = calibrate(tmp_path / "run").transfer_s[""]
    assert transfer_s.observed > 100
    assert transfer_s.high == pytest.approx(0.2, abs=0.05)


def test_an_island_is_given_up_as_diloco_run_does():
    def joins(restarts: int) -> int:
        faults = ("b@20:kill", "b#2@20:kill")
        found = measured(config(faults=faults, restarts=restarts))
        return found["islands"]["b"]["joins"]

    assert [joins(n) for n in (0, 1, 2)] == [1, 2, 3]


def test_a_coordinator_that_is_not_started_again_is_not_predicted():
    faults = ("coordinator@30:kill", "coordinator@50:kill")
    assert measured(config(faults=faults, restarts=2))["phase"] == "done"
    with pytest.raises(ConfigError, match=r"restarts = 1 times; take faults out"):
        measured(config(faults=faults, restarts=1))


def row(calibration, what: str, *faults: str) -> float:
    """One predicted number."""
    rows = predict(calibration, config(faults=faults), 1, None)
    return next(row.predicted for row in rows if row.what == what)


# ---- steps that are not emulated -------------------------------------------------


@pytest.fixture
def real(calibration):
    """Its island `a` takes what its compute takes."""
    made = calibration.config
    plain = dataclasses.replace(made.islands["a"], step_seconds=0.0)
    made = dataclasses.replace(made, islands={**made.islands, "a": plain})
    return dataclasses.replace(calibration, config=made)


def test_real_steps_follow_the_batch_and_the_emulated_floor(real):
    def median(**fields) -> float:
        island = IslandConfig(**{"batch_size": 2, **fields})
        return real.steps_of("a", STANDARD.run, island).median

    assert median(batch_size=6) == pytest.approx(3 * median())
    assert median(step_seconds=0.1) == median()
    assert median(step_seconds=5.0) == 5.0


@pytest.mark.parametrize(
    ("name", "fields"), [("a", {"remat": "full"}), ("b", {}), ("d", {})]
)
def test_what_was_not_recorded_is_asked_for(real, name, fields):
    island = IslandConfig(batch_size=2, **fields)
    with pytest.raises(
        ConfigError, match=rf"islands\.{name}\.step_seconds = 0.*a, b, c"
    ):
        real.steps_of(name, STANDARD.run, island)
