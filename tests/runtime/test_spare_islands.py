"""A spare process takes the place of an island or a coordinator that is killed."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from runtime_support import make_config, placed, with_run

from diloco_jax import LocalCluster
from diloco_jax.config import IslandConfig

pytestmark = pytest.mark.dist

TIMEOUT_S = 120.0


def spares(workdir: Path, command: bytes = b"island") -> list[int]:
    """The process ids of the run's spares, those that have joined included."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--spare" in words and bytes(workdir) in words and command in words:
            found.append(int(folder.name))
    return found


def test_a_spare_joins_when_its_island_is_killed(text):
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {
        "a": IslandConfig(batch_size=2, step_seconds=0.2),
        "pair": IslandConfig(hosts=2, mesh_fsdp=2, batch_size=2, step_seconds=0.2),
    }
    config = placed(dataclasses.replace(config, islands=islands), spares=True)
    with LocalCluster(config) as cluster:

        def trains(status, incarnation):
            island = status["islands"].get("a", {})
            return island.get("incarnation") == incarnation and island["steps"] > 0

        cluster.until(lambda status: trains(status, 1), TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while not (waiting := spares(cluster.workdir)):
            assert time.monotonic() < deadline, "no spare"
            time.sleep(0.1)
        assert len(waiting) == 1, "an island of several hosts has none"
        cluster.islands["a"].kill()
        cluster.until(lambda status: trains(status, 2), TIMEOUT_S)
        assert cluster.islands["a"].pids == waiting
        deadline = time.monotonic() + TIMEOUT_S
        while len(spares(cluster.workdir)) < 2:
            assert time.monotonic() < deadline, "no other spare"
            time.sleep(0.1)
    while spares(cluster.workdir) + spares(cluster.workdir, b"coordinator"):
        assert time.monotonic() < deadline, "spares outlive the run"
        time.sleep(0.1)


def test_a_spare_goes_on_when_the_coordinator_is_killed(text):
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    island = IslandConfig(batch_size=2, step_seconds=0.2)
    config = placed(dataclasses.replace(config, islands={"a": island}), spares=True)
    with LocalCluster(config) as cluster:

        def merged(status):
            return status["merges"]

        cluster.until(merged, TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while not (waiting := spares(cluster.workdir, b"coordinator")):
            assert time.monotonic() < deadline, "no spare"
            time.sleep(0.1)
        assert cluster.coordinator.pids != waiting
        before = cluster.status()["merges"]
        cluster.coordinator.kill()
        cluster.until(lambda status: merged(status) > before, TIMEOUT_S)
        assert cluster.coordinator.pids == waiting
        assert cluster.status()["islands"]["a"]["incarnation"] == 1
