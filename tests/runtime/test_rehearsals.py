"""A rehearsal of three real islands with a deviation on each, by `diloco run`'s own
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
def test_planted_deviations_are_found_and_blamed(fleet, tmp_path, monkeypatch):
    """Each island has one of its own: its steps, its data, its arithmetic."""
    single = [
        benchmark.PLANTED[n] for n in ("throttled step", "slow data", "wrong step")
    ]
    faults = tuple(fault for planted in single for fault in planted.faults)
    together = benchmark.Planted("", (), faults)
    monkeypatch.setitem(benchmark.PLANTED, "all", together)
    found = benchmark.rehearsed("all", tmp_path, fleet)
    assert found["over"] == "", "both kills, and the end in order"
    assert found["deviates"] == sorted((p.cause, *p.islands) for p in single)
    for field, seconds in (("step a", 4 * STEP_S), ("step b", STEP_S + 0.3)):
        assert found["plan"][field] == pytest.approx(seconds, rel=benchmark.WITHIN)
    page = (tmp_path / "rehearsal" / rehearse.PAGE).read_text()
    assert "What is left: nothing of the launcher's" in page
