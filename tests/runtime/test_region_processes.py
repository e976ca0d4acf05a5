"""Three islands of one region in processes of their own: the coordinator sends each
publish once, also while a donor is killed."""

from __future__ import annotations

import dataclasses
import json

import pytest
from runtime_support import make_config, placed, with_run

from diloco_jax import LocalCluster, run_files
from diloco_jax.config import IslandConfig

pytestmark = pytest.mark.dist

TIMEOUT_S = 180.0
NAMES = ("a", "b", "c")
MERGES = 8
"""Merges over which copies are counted."""
MOST_COPIES = 1.05
UNDER_WAY = 2
"""Publishes that may be under way as a donor dies: one of each fragment."""


class Copies:
    """Bytes that the coordinator sent of publishes, and merges, since some moment."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._first = self._now()

    def _now(self) -> tuple[float, int]:
        status = self._cluster.status()
        own = status["islands"].values()
        return sum(i["bytes_down"] for i in own), status["merges"]

    def since(self, merges: int) -> tuple[float, int]:
        """Bytes and merges, once there were so many more merges."""
        until = self._first[1] + merges
        self._cluster.until(lambda s: s["merges"] >= until, TIMEOUT_S)
        nbytes, merged = self._now()
        return nbytes - self._first[0], merged - self._first[1]


def test_the_coordinator_sends_each_publish_once(text):
    config = with_run(
        make_config(text, quorum=2, steps_per_cycle=14, overlap_steps=12),
        total_tokens=10**9,
    )
    islands = {
        name: IslandConfig(batch_size=2, step_seconds=0.15, region="near")
        for name in NAMES
    }
    config = placed(dataclasses.replace(config, islands=islands), restart_delay_s=0.1)
    with LocalCluster(config) as cluster:
        cluster.until(
            lambda s: (
                len(s["islands"]) == len(NAMES)
                and all(i["steps"] > 30 for i in s["islands"].values())
            ),
            TIMEOUT_S,
        )
        log = cluster.workdir / run_files.TAPE
        each = max(
            json.loads(line)["payload_bytes"]
            for line in log.read_text().splitlines()
            if '"merged"' in line and "payload_bytes" in line
        )
        nbytes, merges = Copies(cluster).since(MERGES)
        print(
            f"{nbytes} bytes, {merges} merges of {each}: {nbytes / each / merges:.3f}"
        )
        # One that is under way at either end may count here or there.
        assert nbytes <= MOST_COPIES * each * (merges + 1)
        counted = Copies(cluster)
        cluster.islands["a"].kill()
        nbytes, merges = counted.since(MERGES)
        print(
            f"{nbytes} bytes, {merges} merges of {each}: {nbytes / each / merges:.3f}"
        )
        assert nbytes <= MOST_COPIES * each * (merges + 1 + UNDER_WAY)
        cluster.until(lambda s: s["islands"]["a"]["incarnation"] == 2, TIMEOUT_S)
