"""A config to launch, and a cloud that is not there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fake_cloud import Cloud
from gke_support import changed

from diloco_jax.config import Config, IslandConfig, LaunchConfig
from diloco_jax.launch.command import LaunchOptions, run

WAIT_S = 120.0


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """The commands are called in this process, which is quick."""
    made = Cloud()
    monkeypatch.setattr("diloco_jax.launch.submit.subprocess.run", made.call)
    return made


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two islands of different generations; everything of it in `tmp_path`."""
    islands = {
        "v5p": IslandConfig(topology="v5p:2x2x2", mesh_fsdp=8, batch_size=16),
        "v6e.b": IslandConfig(topology="v6e:4x4", mesh_fsdp=16, batch_size=16),
    }
    launch = LaunchConfig(
        project="my-project",
        name="two",
        image="us-docker.pkg.dev/my-project/diloco/diloco:1",
        zones={"v5p": "us-east5-a", "v6e.b": "us-east5-b"},
        purchase={"v6e.b": "spot"},
        coordinator_zone="us-east5-a",
        cluster="tpus",
        location="us-east5",
    )
    made = Config(islands=islands, launch=launch).validate()
    return made.replace("workdir", str(tmp_path / "run"))


@pytest.fixture
def launch(config: Config):
    """`launch("gke", "stop", project="p")`: the command, with changed settings."""

    def launch(
        on, action="create", *, only=(), disk=False, price="", workers=1, **settings
    ):
        given = {"only": only, "disk": disk, "price": price, "unplanned": True}
        options = LaunchOptions(on=on, action=action, yes=True, **given)
        return run(changed(config, workers, **settings), "configs/two.py", options)

    return launch


@pytest.fixture
def shell(tmp_path):
    """Runs a container's script with a `diloco` that tells what it is told."""
    started = []

    def start(script, body):
        tool = tmp_path / "diloco"
        tool.write_text(f"#!/usr/bin/env bash\n{body}\n")
        tool.chmod(0o755)
        script = script.replace("/var/lib/diloco", str(tmp_path))
        process = subprocess.Popen(
            ["/bin/bash", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RESTART_ATTEMPT": "3"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()
