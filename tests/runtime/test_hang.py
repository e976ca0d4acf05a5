"""A process that hangs is named, ends, and comes back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from runtime_support import coordinator, make_config, placed, with_run

from diloco_jax import LocalCluster, run_files
from diloco_jax.config import IslandConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.observability.tape import read_tape

pytestmark = [pytest.mark.dist]

TIMEOUT_S = 240.0
HANGS_AS_IT_COMPILES = """
import sys, threading
from pathlib import Path
from diloco_jax.config.loading import read_config_json
from diloco_jax.before_jax import prepare_island
config, address, workdir = read_config_json(Path(sys.argv[1])), *sys.argv[2:]
prepare_island(config.island("a"))
from diloco_jax.island import main
from diloco_jax.process import setup_logging
def where_it_hangs(host):
    threading.Event().wait(600)
setup_logging()
main.TrainingHost.compile = where_it_hangs
sys.exit(main.run(config, "a", address, Path(workdir), 1))
"""


def test_a_compiler_that_hangs_ends_the_island_which_says_so(text, tmp_path):
    """Its reports go on meanwhile: to the coordinator it lives."""
    config = placed(make_config(text), compile_budget_s=2.0, hang_budget_s=2.0)
    write_config_json(config, tmp_path / "config.json")
    with coordinator(config, tmp_path / "run") as service:
        arguments = [tmp_path / "config.json", service.address, tmp_path / "a"]
        done = subprocess.run(
            [sys.executable, "-c", HANGS_AS_IT_COMPILES, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert "in where_it_hangs" in done.stderr, "the stack says where"
    tape = list(read_tape(tmp_path / "run" / run_files.TAPE))
    (left,) = [line for line in tape if line["kind"] == "left"]
    assert left["reason"] == "failed"
    assert "compiling may take 4 s (placement.compile_budget_s)" in left["said"]
    alerts = [line["text"] for line in tape if line["kind"] == "alert"]
    assert any("island 'a' failed, and says: hangs" in text for text in alerts)


@pytest.mark.nightly
def test_a_step_that_hangs_is_noticed_named_and_ended(text, tmp_path):
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {n: IslandConfig(batch_size=2, step_seconds=0.2) for n in ("a", "b")}
    config = dataclasses.replace(config, islands=islands)
    config = placed(
        config, faults=("b@10:hang",), hang_budget_s=45.0, restart_delay_s=0.1
    )
    with LocalCluster(config, tmp_path) as cluster:

        def says(status, text):
            return any(text in alert for alert in status.get("alerts", ()))

        # First the coordinator's alert, while the island still counts as alive.
        found = cluster.until(
            lambda s: says(s, "island b has made no step for 30 s"), TIMEOUT_S
        )
        assert found["islands"]["b"]["incarnation"] == 1
        before = found["islands"]["a"]["steps"]
        found = cluster.until(
            lambda s: (
                s["islands"]["b"]["incarnation"] == 2 and s["islands"]["b"]["steps"] > 0
            ),
            TIMEOUT_S,
        )
        assert says(found, "island 'b' failed, and says: hangs: no step")
        assert found["islands"]["a"]["steps"] > before, "the others go on"
        log = (cluster.workdir / run_files.LOGS / "b.log").read_text()
        assert "in strike" in log, "the stack says where"


@pytest.mark.nightly
def test_a_coordinator_that_decides_nothing_any_more_is_started_again(text, tmp_path):
    """Its thread of decisions hangs once a merge is committed, and others go on."""
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {n: IslandConfig(batch_size=2, step_seconds=0.1) for n in ("a", "b")}
    config = dataclasses.replace(config, islands=islands)
    config = placed(
        config,
        faults=("coordinator@4:hang",),
        time_budget_s=2.0,
        outage_budget_s=6.0,
        restart_delay_s=0.1,
    )
    with LocalCluster(config, tmp_path) as cluster:
        found = cluster.until(
            lambda s: (
                s["merges"] > 8
                and {i["state"] for i in s["islands"].values()} == {"training"}
            ),
            TIMEOUT_S,
        )
        assert {i["incarnation"] for i in found["islands"].values()} == {1}
        log = (cluster.workdir / run_files.LOGS / "coordinator.log").read_text()
    assert log.count("hangs: no turn of the coordinator's decisions has ended") == 1
    assert "in strike" in log, "the stack says where"
    tape = list(read_tape(cluster.workdir / run_files.TAPE))
    merges = [(m["fragment"], *m["version"]) for m in tape if m["kind"] == "merged"]
    assert len(merges) == len(set(merges)), "none is made twice"
