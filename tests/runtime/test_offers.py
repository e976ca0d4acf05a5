"""An island that comes back fetches its anchors from another one, hosts and all."""

from __future__ import annotations

import dataclasses
import re

import pytest
import support
import tape_checks
from runtime_support import make_config, placed, with_run
from tiny import SEQUENCE_LENGTH

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import IslandConfig

pytestmark = pytest.mark.dist

STEPS, STEP_SECONDS, CYCLE_STEPS = 90, 0.25, 12
FETCHED = re.compile(r"fetched (\d+) fragments, (\d+) of them from other islands")
TIMEOUT_S = 240.0


def test_an_island_that_was_killed_fetches_from_the_hosts_of_another(text, tmp_path):
    config = make_config(text, quorum=1, steps_per_cycle=CYCLE_STEPS)
    config = with_run(config, total_tokens=2 * STEPS * 4 * SEQUENCE_LENGTH)
    offers = ", ".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    pair = IslandConfig(
        batch_size=4, hosts=2, mesh_fsdp=2, step_seconds=STEP_SECONDS, offers=offers
    )
    alone = IslandConfig(batch_size=4, step_seconds=STEP_SECONDS)
    config = dataclasses.replace(config, islands={"pair": pair, "b": alone})
    config = placed(config, faults=("b@20:kill",), restart_delay_s=0.2)
    run = support.run_in(config.validate(), tmp_path, TIMEOUT_S)
    log = (run.workdir / "logs" / "b.log").read_text()
    lives = [tuple(map(int, found)) for found in FETCHED.findall(log)]
    assert len(lives) == 2
    fragments, from_others = lives[1]
    assert fragments == config.run.sync.fragments
    assert from_others > 0, "all came from the coordinator"
    assert run.summary["phase"] == "done"
    assert tape_checks.version_problems(run.tape) == []
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
