"""A run from Python: its processes can be watched, killed and paused, and all end."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
from runtime_support import client, make_config, placed, with_run

from diloco_jax import LocalCluster, run_files
from diloco_jax.cluster.local import LocalClusterError
from diloco_jax.config import IslandConfig
from diloco_jax.wire.errors import SecurityError

pytestmark = pytest.mark.dist

TIMEOUT_S = 120.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_processes_can_be_killed_and_paused_and_do_not_outlive_it(text):
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {
        name: IslandConfig(batch_size=2, step_seconds=0.2) for name in ("a", "b")
    }
    config = dataclasses.replace(config, islands=islands)
    with LocalCluster(placed(config, restart_delay_s=0.1)) as cluster:
        workdir = cluster.workdir

        def trains(status, name, incarnation):
            island = status["islands"].get(name, {})
            return island.get("incarnation") == incarnation and island["steps"] > 0

        cluster.until(lambda s: trains(s, "a", 1) and trains(s, "b", 1), TIMEOUT_S)
        address = (workdir / run_files.ADDRESS).read_text()
        with (
            client(address) as stranger,
            pytest.raises(SecurityError, match="has no certificates"),
        ):
            stranger.status(TIMEOUT_S)
        made = [path for path in workdir.rglob("*") if not path.is_symlink()]
        assert {"keys", "logs", "tape.jsonl"} <= {path.name for path in made}
        open_to_others = [p for p in (workdir, *made) if p.stat().st_mode & 0o077]
        assert open_to_others == []
        (first,) = cluster.islands["b"].pids
        cluster.islands["b"].kill()
        cluster.until(lambda s: trains(s, "b", 2), TIMEOUT_S)
        assert not is_alive(first)
        (a,) = cluster.islands["a"].pids
        cluster.islands["a"].pause()
        deadline = time.monotonic() + TIMEOUT_S
        while state_of(a) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state_of(a) == "T"
        cluster.islands["a"].resume()
        with pytest.raises(LocalClusterError, match="no process for host 1"):
            cluster.islands["a"].kill(host=1)
        with pytest.raises(
            LocalClusterError, match=r"not meet the condition in 0\.1 s"
        ):
            cluster.until(lambda status: False, 0.1)
        pids = [*cluster.coordinator.pids, a, *cluster.islands["b"].pids]
        assert len(pids) == 3
    assert not any(is_alive(pid) for pid in pids)
    assert not workdir.exists()


def test_a_run_that_cannot_start_says_why(text, tmp_path):
    config = placed(make_config(text), certificates=str(tmp_path / "none"))
    with (
        LocalCluster(config, tmp_path / "kept") as cluster,
        pytest.raises(LocalClusterError, match="exit code 2"),
    ):
        cluster.wait(TIMEOUT_S)
    assert "none" in cluster.log.read_text()
