"""Rehearsals of three real islands with a deviation in each, by `diloco run`'s own
processes. The other deviations, and the clean runs, are in benchmarks/rehearse.py."""

from __future__ import annotations

import dataclasses

import pytest
import rehearse as benchmark
import tiny

from diloco_jax.launch import rehearse

STEP_S = 0.1


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.setattr(rehearse, "QUIET_S", 3.0)
    monkeypatch.setattr(rehearse, "QUIET_CYCLES", 2)
    monkeypatch.setattr(benchmark, "STEP_S", STEP_S)
    # So few bytes take as long as a loaded machine makes them wait.
    monkeypatch.setattr(benchmark, "LINK_GBIT_PER_S", 5e-4)
    made = benchmark.config()
    sync = dataclasses.replace(made.run.sync, steps_per_cycle=8)
    run = dataclasses.replace(
        made.run, model=tiny.MODEL, sync=sync, sequence_length=tiny.SEQUENCE_LENGTH
    )
    made = dataclasses.replace(made, run=run)
    return made.replace("restart_delay_s", 0.5)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["throttled step", "wrong step", "slow data"])
def test_a_planted_deviation_is_found_and_blamed(name, fleet, tmp_path):
    found = benchmark.rehearsed(name, tmp_path, fleet)
    assert found["over"] == "", "both kills, and the end in order"
    assert found["right"], found["deviates"]
    truth = {"throttled step": ("step a", 4 * STEP_S), "slow data": ("step b", 0.4)}
    if name in truth:
        field, seconds = truth[name]
        assert found["plan"][field] == pytest.approx(seconds, rel=benchmark.WITHIN)
    page = (tmp_path / "rehearsal" / rehearse.PAGE).read_text()
    assert "What is left: nothing of the launcher's" in page
