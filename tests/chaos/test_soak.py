"""Conclusions of the soak from its looks at processes, tape and metrics."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import soak
from flatness import Disk, Use, UseOverTime, growths


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


def test_a_look_finds_the_processes_of_a_workdir_and_its_files(tmp_path):
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "0").write_bytes(bytes(1 << 16))
    (tmp_path / "tape.jsonl").write_bytes(bytes(1 << 16))
    words = ["--name", "b", "--workdir", str(tmp_path)]
    command = [sys.executable, "-c", "import time; time.sleep(600)", *words]
    child = subprocess.Popen(command)
    try:
        looks = UseOverTime(tmp_path, 1.0)
        # It may not have begun, or have no memory of its own yet.
        while not (looks.uses and looks.uses[-1].memory > 1e5):
            looks._look()
            assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    found = looks.uses[-1]
    assert (found.name, found.threads) == ("b", 1)
    assert found.descriptors >= 3
    assert 1 << 16 <= looks.disk[0].state < looks.disk[0].total


def line(time, step, island="a"):
    return {
        "kind": "island",
        "island": island,
        "time": time,
        "step": step,
        "median_step_seconds": 0.5,
    }


def strike(time, who, kind, seconds=0.0, missed=()):
    return {
        "time": time,
        "who": [who],
        "kind": kind,
        "seconds": seconds,
        "missed": list(missed),
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
