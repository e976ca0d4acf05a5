"""A cloud that is not there: fake commands on PATH, and what they were told."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import fake_gcloud
import fake_kubectl
import fake_sky
import pytest

from diloco_jax.config import Config, IslandConfig, LaunchConfig
from diloco_jax.launch.command import LaunchOptions, run

HERE = Path(__file__).parent
WAIT_S = 120.0


class Cloud:
    """The state that the fake commands share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        for name in ("things.json", "objects.json", "failures.json"):
            (folder / name).write_text("{}")
        (folder / "jobs.json").write_text("[]")
        (folder / "calls.jsonl").touch()

    @property
    def calls(self) -> list[list[str]]:
        """Every command line so far."""
        lines = (self._folder / "calls.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def changes(self) -> list[list[str]]:
        """Those that do not only look; forgets them all."""
        looks = {"describe", "get", "get-credentials", "queue"}
        found = [call for call in self.calls if not looks & set(call[:6])]
        (self._folder / "calls.jsonl").write_text("")
        return found

    @property
    def things(self) -> dict[str, dict[str, Any]]:
        """By kind and name: what `gcloud` has made."""
        things: dict[str, Any] = json.loads((self._folder / "things.json").read_text())
        return {kind: made for kind, made in things.items() if made}

    @property
    def objects(self) -> dict[str, Any]:
        """By kind/name: what `kubectl` has made."""
        objects: dict[str, Any] = json.loads(
            (self._folder / "objects.json").read_text()
        )
        return objects

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """Every managed job, oldest first."""
        jobs: list[dict[str, Any]] = json.loads(
            (self._folder / "jobs.json").read_text()
        )
        return jobs

    def set_job(self, name: str, status: str) -> None:
        """As if the newest job of that name had come to that."""
        jobs = self.jobs
        [job for job in jobs if job["job_name"] == name][-1]["status"] = status
        (self._folder / "jobs.json").write_text(json.dumps(jobs))

    def set_state(self, kind: str, name: str, state: str) -> None:
        """As if it had happened in the cloud."""
        things = self.things
        things[kind][name]["state"] = state
        (self._folder / "things.json").write_text(json.dumps(things))

    def set_object(self, key: str, **fields: Any) -> None:
        """The same for an object."""
        objects = self.objects
        objects.setdefault(key, {}).update(fields)
        (self._folder / "objects.json").write_text(json.dumps(objects))

    def fail(self, command: str = "", code: int = 0, text: str = "") -> None:
        """Lets every command line that begins so fail; without one, none."""
        failures = {command: (code, text)} if command else {}
        (self._folder / "failures.json").write_text(json.dumps(failures))


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """The fake commands are called in this process, which is quick."""

    def call(
        arguments: tuple[str, ...], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        output, errors = io.StringIO(), io.StringIO()
        tools = {"gcloud": fake_gcloud, "kubectl": fake_kubectl, "sky": fake_sky}
        tool = tools[arguments[0]]
        with redirect_stdout(output), redirect_stderr(errors):
            code = tool.main(list(arguments[1:]))
        return subprocess.CompletedProcess(
            arguments, code, output.getvalue(), errors.getvalue()
        )

    monkeypatch.setattr("diloco_jax.launch.submit.subprocess.run", call)
    monkeypatch.setenv("FAKE_CLOUD", str(tmp_path / "cloud"))
    return Cloud(tmp_path / "cloud")


@pytest.fixture
def cloud_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """The fake commands are the ones of their names on PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("gcloud", "kubectl", "sky"):
        tool = tools / name
        program = f"{sys.executable} {HERE}/fake_{name}.py"
        tool.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_CLOUD", str(tmp_path / "cloud"))
    return Cloud(tmp_path / "cloud")


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
    placement = dataclasses.replace(made.placement, workdir=str(tmp_path / "run"))
    return dataclasses.replace(made, placement=placement)


@pytest.fixture
def launch(config: Config):
    """`launch("gke", "stop", project="p")`: the command, with changed settings."""

    def launch(
        on, action="create", *, only=(), disk=False, price="", workers=1, **settings
    ):
        changed = dataclasses.replace(
            config,
            launch=dataclasses.replace(config.launch, **settings),
            placement=dataclasses.replace(config.placement, workers=workers),
        )
        options = LaunchOptions(
            on=on,
            action=action,
            yes=True,
            only=only,
            disk=disk,
            price=price,
            unplanned=True,
        )
        return run(changed, "configs/two.py", options)

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
