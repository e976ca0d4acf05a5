"""A run from Python: its processes can be watched, traced, killed and paused, and all
end."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import jax
import pytest
from runtime_support import client, make_config, placed, with_run

from diloco_jax import LocalCluster, cli, run_files
from diloco_jax.cluster.cluster import LocalClusterError
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


@pytest.fixture(scope="module")
def running(text):
    """A run that goes on, and what ends it."""
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {
        name: IslandConfig(batch_size=2, step_seconds=0.1) for name in ("a", "b")
    }
    config = dataclasses.replace(config, islands=islands)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(placed(config, restart_delay_s=0.1)))
        cluster.until(lambda s: trains(s, "a", 1) and trains(s, "b", 1), TIMEOUT_S)
        yield cluster, stack


def trains(status, name, incarnation):
    island = status["islands"].get(name, {})
    return island.get("incarnation") == incarnation and island["steps"] > 5


def test_only_its_user_may_read_it_and_whoever_has_its_keys(running):
    cluster, _ = running
    workdir = cluster.workdir
    with (
        client((workdir / run_files.ADDRESS).read_text()) as stranger,
        pytest.raises(SecurityError, match="has no certificates"),
    ):
        stranger.status(TIMEOUT_S)
    made = [path for path in workdir.rglob("*") if not path.is_symlink()]
    assert {"keys", "logs", "tape.jsonl"} <= {path.name for path in made}
    assert [p for p in (workdir, *made) if p.stat().st_mode & 0o077] == []


def test_an_operator_gets_a_trace_of_steps(running, capsys):
    cluster, _ = running
    where = ("--coordinator", str(cluster.workdir))
    assert cli.main(["profile", "a", "--steps", "3", *where]) == 0
    told = capsys.readouterr().err
    assert f"its next 3 steps into {run_files.PROFILES}/a-STEP" in told
    folder = cluster.workdir / run_files.PROFILES
    log = cluster.workdir / run_files.LOGS / "a.log"
    cluster.until(lambda s: "trace of 3 steps is in" in log.read_text(), TIMEOUT_S)
    (file,) = folder.rglob("*.xplane.pb")
    (name,) = (path.name for path in folder.iterdir())
    traced = jax.profiler.ProfileData.from_file(str(file))
    numbers = {
        int(dict(event.stats)["step_num"])
        for plane in traced.planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    }
    assert len([number for number in numbers if number >= int(name[2:])]) >= 3
    assert cli.main(["profile", "c", *where]) == 3
    assert "no island 'c' was ever in the run" in capsys.readouterr().err


def test_processes_can_be_killed_and_paused_and_do_not_outlive_it(running, capsys):
    cluster, stack = running
    (first,) = cluster.islands["b"].pids
    cluster.islands["b"].kill()
    cluster.until(lambda s: trains(s, "b", 2), TIMEOUT_S)
    assert not is_alive(first)
    (a,) = cluster.islands["a"].pids
    cluster.islands["a"].pause()
    cluster.until(lambda s: s["islands"]["a"]["state"] == "absent", TIMEOUT_S)
    assert state_of(a) == "T"
    assert cli.main(["profile", "a", "--coordinator", str(cluster.workdir)]) == 3
    assert "'a' is absent" in capsys.readouterr().err
    before = cluster.status()["islands"]["a"]["steps"]
    cluster.islands["a"].resume()
    cluster.until(lambda s: s["islands"]["a"]["steps"] > before, TIMEOUT_S)
    with pytest.raises(LocalClusterError, match="no process for host 1"):
        cluster.islands["a"].kill(host=1)
    with pytest.raises(LocalClusterError, match=r"not meet the condition in 0\.1 s"):
        cluster.until(lambda status: False, 0.1)
    pids = [*cluster.coordinator.pids, a, *cluster.islands["b"].pids]
    assert len(pids) == 3
    stack.close()
    assert not any(is_alive(pid) for pid in pids)
    assert not cluster.workdir.exists()


def test_a_run_that_cannot_start_says_why(text, tmp_path):
    config = placed(make_config(text), certificates=str(tmp_path / "none"))
    with (
        LocalCluster(config, tmp_path / "kept") as cluster,
        pytest.raises(LocalClusterError, match="exit code 2"),
    ):
        cluster.wait(TIMEOUT_S)
    assert "none" in cluster.log.read_text()
