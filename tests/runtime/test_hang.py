"""An island whose step hangs is named, ends, and comes back as its next incarnation."""

from __future__ import annotations

import dataclasses

import pytest
from runtime_support import make_config, placed, with_run

from diloco_jax import LocalCluster, run_files
from diloco_jax.config import IslandConfig

pytestmark = [pytest.mark.dist, pytest.mark.nightly]

TIMEOUT_S = 240.0


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
