"""Conclusions of the soak from its looks at processes, tape and metrics."""

import dataclasses
from types import SimpleNamespace

import pytest
import soak
from flatness import Disk, Use, growths
from test_measure import strike


def use(time, memory, age_s=100.0, name="a"):
    return Use(time, name, age_s, memory, 30, 20)


def test_growth_is_that_of_thirds_without_young_processes():
    uses = [use(float(t), 100 if t < 50 else 120) for t in range(100)]
    uses += [use(float(t), 5000, age_s=1.0) for t in range(100)]
    disk = [Disk(float(t), 10 + t, 1000) for t in range(100)]
    found = growths(uses, disk, since=0.0, settled_s=20.0)
    shares = {(g.name, g.field): round(g.share, 3) for g in found}
    assert shares == {
        ("a", "memory"): 0.2,
        ("a", "descriptors"): 0.0,
        ("a", "threads"): 0.0,
        ("workdir", "disk"): round((10 + 82.5) / (10 + 16.5) - 1, 3),
    }
    later = growths(uses, disk, since=60.0, settled_s=20.0)
    assert next(g for g in later if g.field == "memory").share == 0
    assert not soak.flat_check("memory", found).holds
    assert soak.flat_check("memory", later).holds
    assert not soak.flat_check("memory", []).holds, "nothing was seen"


def line(time, step, island="a"):
    return {
        "kind": "island",
        "island": island,
        "time": time,
        "step": step,
        "median_step_seconds": 0.5,
    }


def test_the_bound_takes_off_restarts_and_stops_of_islands_alone():
    lines = [line(12.0, 2), line(20.0, 18), line(32.0, 2), line(100.0, 100)]
    names = ("a", "b", "c", "d")
    lines += [line(12.0, 2, n) for n in names[1:]]
    run = SimpleNamespace(
        config=SimpleNamespace(islands=dict.fromkeys(names)),
        metrics=lines,
        tape=[{"kind": "stopping", "time": 111.0}],
        summary={"goodput": 0.9},
    )
    struck = [
        strike(21.0, "a", "kill"),  # Until 31.
        strike(25.0, "a", "stop", 5.0),  # Away anyway.
        strike(40.0, "a", "stop", 4.0),
        strike(50.0, "coordinator", "kill"),
        strike(51.0, "coordinator", "stop", 5.0),
        strike(60.0, "b", "stop", 3.0, missed=["b"]),
        strike(101.0, "a", "kill"),  # Until the end, 10 s later.
    ]
    costs = soak.cost_of(struck, run)
    assert (costs.began, costs.ended) == (11.0, 111.0)
    assert (costs.killed_s, costs.stopped_s) == (20.0, 4.0)
    assert costs.bound == pytest.approx(1 - 24 / 400)
    longer = dataclasses.replace(costs, stopped_s=44.0)
    assert longer.bound == pytest.approx(1 - 64 / 400)
