"""`diloco profile` of a live run: the trace is there, and the run goes on."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from runtime_support import make_config, with_run

from diloco_jax import LocalCluster, cli, run_files
from diloco_jax.config import IslandConfig

pytestmark = pytest.mark.dist

TIMEOUT_S = 120.0


def test_an_operator_gets_a_trace_of_steps_and_the_run_goes_on(text, capsys):
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {
        name: IslandConfig(batch_size=2, step_seconds=0.05) for name in ("a", "b")
    }
    config = dataclasses.replace(config, islands=islands)
    with LocalCluster(config) as cluster:
        where = ("--coordinator", str(cluster.workdir))

        def steps(status, name):
            return status["islands"].get(name, {}).get("steps", 0)

        cluster.until(lambda s: steps(s, "a") > 5 and steps(s, "b") > 5, TIMEOUT_S)
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
        cluster.islands["b"].pause()
        cluster.until(lambda s: s["islands"]["b"]["state"] == "absent", TIMEOUT_S)
        assert cli.main(["profile", "b", *where]) == 3
        assert "'b' is absent" in capsys.readouterr().err
        cluster.islands["b"].resume()
        before = steps(cluster.status(), "a")
        cluster.until(lambda s: steps(s, "a") > before + 5, TIMEOUT_S)
