"""Islands as managed jobs of SkyPilot, one each, and the coordinator as another one.

SkyPilot buys the machines, tries one zone after the other, does so again when a slice
is taken away, and gives the machines back when the job ends. On the machines the same
script runs as on other TPU VMs, `host.sh`. What SkyPilot cannot do is in docs/sky.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from diloco_jax.config.placement import region_of
from diloco_jax.launch.manifests import yaml_text
from diloco_jax.launch.spec import COORDINATOR, PERMIT, PORT, LaunchSpec, PlacedIsland
from diloco_jax.launch.submit import Command, Deployment, Resource
from diloco_jax.launch.tpu_vm import (
    DISK,
    PART_LABEL,
    RUN_LABEL,
    coordinator_script,
    island_script,
    kept,
    part_of,
)

Task = dict[str, Any]

BOOT_GB = 200
"""Gigabytes of the boot disk, with the image and the text."""
DEAD = (
    *("CANCELLED", "CANCELLING", "FAILED", "FAILED_SETUP", "FAILED_PRECHECKS"),
    *("FAILED_NO_RESOURCE", "FAILED_CONTROLLER"),
)
ACCOUNT = "skypilot-v1"
"""Account that SkyPilot makes in each project for all of its machines."""


def deployment(
    spec: LaunchSpec, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on sky` makes and runs; see
    `tpu_vm.deployment`."""
    spec = _as_skypilot(spec)
    (host,) = hosts(spec)
    address = f"{host}:{PORT}"
    names = {COORDINATOR: spec.coordinator}
    names |= {island.name: island.resource for island in spec.islands}
    tasks = {COORDINATOR: _coordinator_task(spec, address, now_unix)}
    for island in spec.islands:
        tasks[island.name] = _island_task(spec, island, address, now_unix)
    status = ("diloco", "status", address, "--json", "--certificates", certificates)
    files = {f"{names[owner]}.yaml": yaml_text(tasks[owner]) for owner in tasks}
    jobs = (_job(spec, o, n, f"{folder}/{n}.yaml") for o, n in names.items())
    return Deployment(
        files={**files, PERMIT: "The run may begin.\n"},
        resources=(*kept(spec, certificates, f"{folder}/{PERMIT}"), *jobs),
        status=Command(status),
    )


def hosts(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator, for its certificate."""
    return (spec.settings.coordinator_address,)


def account(spec: LaunchSpec) -> str:
    """Return the account that all machines act as."""
    return f"{ACCOUNT}@{spec.settings.project}.iam.gserviceaccount.com"


def _as_skypilot(spec: LaunchSpec) -> LaunchSpec:
    """Return the launch with the account that there is, which must read the secrets."""
    settings = dataclasses.replace(
        spec.settings, service_account=account(spec), coordinator_account=""
    )
    return dataclasses.replace(spec, settings=settings)


def _island_task(
    spec: LaunchSpec, island: PlacedIsland, address: str, now_unix: int
) -> Task:
    """Return the island's job: its script on every host of one slice."""
    found = island.slice
    wanted = {
        "accelerators": {f"tpu-{found.accelerator_type}": 1},
        # Not in a queue: SkyPilot gives it up after 100 minutes and joins it anew, and
        # deletes no queued resource. Each would become a slice that nobody uses.
        "accelerator_args": {"runtime_version": found.generation.runtime_version},
        "use_spot": island.purchase == "spot",
    }
    places = [{"infra": _infra(zone)} for zone in island.zones]
    where: Task = {"ordered": places} if len(places) > 1 else places[0]
    script = island_script(spec, island, address, now_unix, ())
    return _task(spec, island.resource, island.name, {**wanted, **where}, script)


def _coordinator_task(spec: LaunchSpec, address: str, now_unix: int) -> Task:
    """Return the coordinator's job. Its disk outlives it, and its machine's address is
    registered under its name."""
    settings = spec.settings
    volume = {
        "name": spec.coordinator,
        "path": DISK,
        "storage_type": "network",
        "attach_mode": "read_write",
        "auto_delete": False,
    }
    wanted = {
        "infra": _infra(settings.coordinator_zone),
        "instance_type": settings.coordinator_machine,
        "use_spot": False,
        "volumes": [volume],
    }
    script = coordinator_script(spec, address, now_unix, ())
    return _task(spec, spec.coordinator, COORDINATOR, wanted, script)


def _task(spec: LaunchSpec, name: str, owner: str, wanted: Task, script: str) -> Task:
    """Return a job of SkyPilot, whose machines are in the launch's network."""
    settings = spec.settings
    inside = {"subnet_names": settings.subnetwork} if settings.subnetwork else {}
    labels = {RUN_LABEL: spec.name, PART_LABEL: part_of(owner)}
    return {
        "name": name,
        "resources": {**wanted, "disk_size": BOOT_GB, "labels": labels},
        "config": {"gcp": {"vpc_name": settings.network, **inside}},
        "run": (
            f"cat >/tmp/diloco-host.sh <<'END_OF_SCRIPT'\n{script.rstrip()}\n"
            f"END_OF_SCRIPT\nsudo /bin/bash /tmp/diloco-host.sh serve\n"
        ),
    }


def _job(spec: LaunchSpec, owner: str, name: str, file: str) -> Resource:
    words = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", name]
    if spec.settings.internal_ips:
        words += ["--config", "gcp.use_internal_ips=true"]  # A job may not say so.
    return Resource(
        what=f"job {name}",
        owner=owner,
        find=Command(("sky", "jobs", "queue", "--all", "--output", "json")),
        create=(Command((*words, file), 1800),),
        delete=Command(
            ("sky", "jobs", "cancel", "--yes", "--name", name), 600, deletes=True
        ),
        logs=Command(("sky", "jobs", "logs", "--no-follow", "--name", name)),
        job=name,
        dead=DEAD,
        runs=True,
    )


def _infra(zone: str) -> str:
    return f"gcp/{region_of(zone)}/{zone}"
