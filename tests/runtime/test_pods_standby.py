"""Pods of a launch with a standby, run as real processes: the coordinator's pod is
killed, and its standby leads the run to its end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import support
import tape_checks
from kubernetes_server import leases
from pods_support import Pods
from runtime_support import PATIENCE_S, placed
from training_support import lasting

from diloco_jax.config import Config, LaunchConfig
from diloco_jax.coordinator.mandates.kubernetes import ANNOTATION
from diloco_jax.coordinator.mandates.store import decode
from diloco_jax.coordinator.standby.name import read_name
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.standby.mandate import Mandate
from diloco_jax.workdir import read_summary

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timing,
    pytest.mark.nightly,
    pytest.mark.timeout(8 * PATIENCE_S),
]

TRAINING_S, BUDGET_S, LINGER_S = 45, 4.0, 2.0


def paired(text: Path) -> Config:
    """Two islands of one chip each, and a standby in another zone."""
    config = lasting(text, TRAINING_S)
    islands = {
        name: dataclasses.replace(island, topology="v6e:1x1")
        for name, island in config.islands.items()
    }
    launch = LaunchConfig(
        project="my-project",
        name="pods",
        image="registry.example/image",
        data="gs://bucket/text",
        zones={"a": "us-east5-a", "b": "us-east5-b"},
        coordinator_zone="us-east5-a",
        standby_zone="us-east5-b",
        cluster="tpus",
        location="us-east5",
        namespace="team",
        max_hours=1.0,
    )
    config = dataclasses.replace(config, islands=islands, launch=launch)
    return placed(
        config,
        time_budget_s=BUDGET_S,
        snapshot_every_s=2.0,
        evaluate_every_steps=0,
        linger_s=LINGER_S,
    )


def test_a_standbys_pod_leads_on_and_the_coordinators_new_pod_follows_it(
    text: Path, tmp_path: Path
) -> None:
    config = paired(text)
    with leases() as (server, held):
        pods = Pods(config, text, tmp_path, server)

        def mandate() -> Mandate:
            lease = held.objects["pods-mandate"]
            return decode(lease["metadata"]["annotations"][ANNOTATION], "the Lease")

        def node(name: str) -> str:
            return read_name(tmp_path / name / "run")

        try:
            # Before there is a run, a standby has nobody to follow.
            standby = pods.start("standby")
            pods.begin()
            first = pods.start("coordinator")
            pods.await_that(lambda: bool(held.objects) and bool(mandate().in_step))
            assert mandate().in_step == node("standby")
            assert (mandate().holder, mandate().reign) == (node("coordinator"), 1)
            islands = [pods.start(name) for name in config.islands]
            for name in config.islands:
                pods.await_log(name, "begins to train")

            pods.kill(first)
            pods.await_log("standby", "takes over, from log")
            pods.await_log("standby", "is served at")
            # The Job's next pod, on the same disk.
            second = pods.start("coordinator", attempt=1)
            pods.await_that(lambda: mandate().in_step == node("coordinator"))
            assert (mandate().holder, mandate().reign) == (node("standby"), 2)

            # The run's end ends every pod well: the Jobs are complete, and no machine
            # is left.
            ended = [p.wait(3 * PATIENCE_S) for p in (*islands, second, standby)]
            assert ended == [0] * 4
            assert mandate().over
        finally:
            pods.close()
    workdir = tmp_path / "standby" / "run"
    summary = read_summary(workdir)
    assert (summary["phase"], summary["term"]) == ("done", 1)
    assert all(i["joins"] == 1 for i in summary["islands"].values())
    tape = list(read_tape(workdir / "tape.jsonl"))
    assert tape_checks.version_problems(tape) == []
    sizes = support.fragment_sizes(config)
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
