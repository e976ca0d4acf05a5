"""What the pods of a launch run, as real processes: rendered commands, secrets and exit
codes, from the first start to an island that comes after the end."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from runtime_support import PATIENCE_S, client, hello, make_config, placed

from diloco_jax.cluster.commands import free_port
from diloco_jax.config import Config, LaunchConfig
from diloco_jax.deadlines import Deadlines
from diloco_jax.launch import gke
from diloco_jax.launch.certificates import prepare_certificates
from diloco_jax.launch.order import ROOT, make_order
from diloco_jax.protocol import messages
from diloco_jax.wire import principal
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.workdir import read_summary

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(8 * PATIENCE_S)]


class Pods:
    """A cluster of processes: each pod has a folder for its `/var/lib/diloco`."""

    def __init__(self, config: Config, text: Path, root: Path) -> None:
        self.root, self.text = root, text
        self.address = f"127.0.0.1:{free_port()}"
        order = make_order(config, "pods.py", "gke")
        self.config_json = order.config_json
        self.certificates = root / "certificates"
        hosts = (*gke.hosts(order), "127.0.0.1")
        prepare_certificates(self.certificates, hosts, tuple(config.islands))
        self.running: list[subprocess.Popen[bytes]] = []
        files = gke.deployment(order, "", "", int(time.time())).files
        self.pods = {}
        for file in files.values():
            for made in yaml.safe_load_all(file):
                if made["kind"] == "Job":
                    self.pods["coordinator"] = made["spec"]["template"]["spec"]
                if made["kind"] == "JobSet":
                    (jobs,) = made["spec"]["replicatedJobs"]
                    name = made["metadata"]["labels"]["diloco-part"]
                    self.pods[name] = jobs["template"]["spec"]["template"]["spec"]
        tool = root / "bin" / "diloco"
        tool.parent.mkdir()
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m diloco_jax.cli "$@"\n')
        tool.chmod(0o755)

    def start(self, name: str, attempt: int = 0) -> subprocess.Popen[bytes]:
        """A new pod: nothing is left of the one before but the coordinator's disk."""
        pod = self.pods[name]
        folder = self.root / (name if name == "coordinator" else f"{name}-{attempt}")
        self._mount(pod, name, folder)
        (container,) = pod["containers"]
        bash, option, script = container["command"]
        script = self._here(script, folder)
        env = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        env |= {"RESTART_ATTEMPT": str(attempt), "JAX_PLATFORMS": "cpu"}
        env["PATH"] = f"{self.root}/bin:{os.environ['PATH']}"
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [bash, option, script],
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
            )
        self.running.append(process)
        return process

    def _mount(self, pod: dict, name: str, folder: Path) -> None:
        """The volumes that the pod names, where it mounts them."""
        (container,) = pod["containers"]
        for mount in container["volumeMounts"]:
            place = Path(self._here(mount["mountPath"], folder))
            place.mkdir(parents=True, exist_ok=True)
            if mount["name"] == "config":
                text = self._here(self.config_json, folder)
                (place / "config.json").write_text(text)
            if mount["name"] == "data":
                for file in self.text.iterdir():
                    (place / file.name).write_bytes(file.read_bytes())
            if mount["name"] == "certificates":
                stem = name if name == "coordinator" else principal.island(name).stem
                for file in ("ca.pem", f"{stem}.pem", f"{stem}.key"):
                    content = (self.certificates / file).read_bytes()
                    (place / file).write_bytes(content)
                    (place / file).chmod(0o400)

    def _here(self, text: str, folder: Path) -> str:
        text = text.replace(ROOT, str(folder))
        text = text.replace("pods-coordinator.default.svc:7077", self.address)
        return text.replace("0.0.0.0:7077", self.address)

    def log(self, name: str) -> Path:
        """What the pods of that name have said."""
        return self.root / f"{name}.log"

    def await_log(self, name: str, line: str) -> None:
        """Return once a pod has said that."""
        until = time.monotonic() + 2 * PATIENCE_S
        while line not in (said := self.log(name).read_text()):
            assert time.monotonic() < until, said
            time.sleep(0.05)


def test_a_run_from_its_first_pod_to_one_that_comes_too_late(
    text: Path, tmp_path: Path
) -> None:
    config = make_config(text, cycles=40, quorum=1)
    a = dataclasses.replace(config.islands["a"], topology="v6e:1x1", step_seconds=0.02)
    b = dataclasses.replace(config.islands["b"], topology="v6e:1x1")
    launch = LaunchConfig(
        project="my-project",
        name="pods",
        image="image",
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
        for process in pods.running:
            process.kill()
            process.wait(PATIENCE_S)


def run_pods(pods: Pods, config: Config) -> None:
    def ends(process: subprocess.Popen[bytes]) -> int:
        return process.wait(2 * PATIENCE_S)

    coordinator = pods.start("coordinator")
    pods.await_log("coordinator", "is served at")

    # A crash loop: what fails before its first step is refused, which fails the JobSet.
    tls = TlsFiles.load(pods.certificates, principal.island("b"))
    deadlines = Deadlines(PATIENCE_S)
    with client(pods.address, tls=tls, deadlines=deadlines) as island:
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
    coordinator.send_signal(signal.SIGTERM)
    assert ends(coordinator) == 0
    # A new pod of the coordinator finds the run over, and says so too.
    again = pods.start("coordinator")
    assert ends(pods.start("a", attempt=3)) == 0
    again.send_signal(signal.SIGTERM)
    assert ends(again) == 0
