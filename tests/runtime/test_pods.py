"""The pods of a launch, as real processes: rendered commands, secrets and exit
codes, from the first start to an island that comes after the end."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
from pathlib import Path

import pytest
from pods_support import Pods
from runtime_support import PATIENCE_S, client, hello, make_config, placed

from diloco_jax.config import Config, LaunchConfig
from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol import messages
from diloco_jax.wire import peers
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.workdir import read_summary

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(8 * PATIENCE_S)]


def test_a_run_from_its_first_pod_to_one_that_comes_too_late(
    text: Path, tmp_path: Path
) -> None:
    config = make_config(text, cycles=40, quorum=1)
    a = dataclasses.replace(config.islands["a"], topology="v6e:1x1", step_seconds=0.02)
    b = dataclasses.replace(config.islands["b"], topology="v6e:1x1")
    launch = LaunchConfig(
        project="my-project",
        name="pods",
        image="registry.example/image",
        data="gs://bucket/text",
        zones={"a": "us-east5-a", "b": "us-east5-b"},
        coordinator_zone="us-east5-a",
        cluster="tpus",
        location="us-east5",
        max_hours=1.0,
    )
    config = dataclasses.replace(config, islands={"a": a, "b": b}, launch=launch)
    config = placed(config, fruitless_starts=1)
    pods = Pods(config, text, tmp_path)
    try:
        run_pods(pods, config)
    finally:
        pods.close()


def run_pods(pods: Pods, config: Config) -> None:
    def ends(process: subprocess.Popen[bytes]) -> int:
        return process.wait(2 * PATIENCE_S)

    pods.begin()
    coordinator = pods.start("coordinator")
    pods.await_log("coordinator", "is served at")

    # A crash loop: what fails before its first step is refused, which fails the JobSet.
    tls = TlsFiles.load(pods.certificates, peers.island("b"))
    deadlines = Deadlines(PATIENCE_S)
    with client(pods.addresses["coordinator"], tls=tls, deadlines=deadlines) as island:
        stream = island.open_control(hello(config, "b"))
        stream.send(messages.Goodbye(reason="failed", text="out of memory"))
        stream.close(PATIENCE_S)
    assert ends(pods.start("b")) == 3
    assert "failed 1 times in a row before its first step" in pods.log("b").read_text()

    # A preemption: the notice, a goodbye, and a new pod with a higher incarnation.
    island_a = pods.start("a")
    pods.await_log("a", "begins to train")
    island_a.send_signal(signal.SIGTERM)
    assert ends(island_a) == 1
    assert ends(pods.start("a", attempt=1)) == 0

    # The end: the coordinator has summed up, and tells whoever comes now.
    pods.await_log("coordinator", "are told that it is over")
    summary = read_summary(pods.root / "coordinator" / "run")
    assert summary["phase"] == "done"
    assert summary["islands"]["a"]["joins"] == 2
    assert ends(pods.start("a", attempt=2)) == 0
    assert "it came too late" in pods.log("a").read_text()
    assert coordinator.poll() is None
    # Asked to end: its Job is not complete.
    coordinator.send_signal(signal.SIGTERM)
    assert ends(coordinator) == 1
    # A new pod of the coordinator finds the run over, and says so too.
    again = pods.start("coordinator")
    assert ends(pods.start("a", attempt=3)) == 0
    again.send_signal(signal.SIGTERM)
    assert ends(again) == 1
