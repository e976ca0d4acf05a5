"""Islands as managed jobs of SkyPilot, one each, and the coordinator as another one.

SkyPilot buys the machines, tries one zone after the other, does so again when a slice
is taken away, and gives the machines back when the job ends. On the machines the same
script runs as on other TPU VMs, `host.sh`. What SkyPilot cannot do, and why `tpu_vm`
stays, is in docs/sky.md; tests/launch/test_sky_limits.py asks SkyPilot itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from diloco_jax.launch.host import DISK, coordinator_script, island_script
from diloco_jax.launch.order import COORDINATOR, PERMIT, PORT, Order
from diloco_jax.launch.placing import PlacedIsland, region_of
from diloco_jax.launch.resources import (
    PART_LABEL,
    RUN_LABEL,
    Command,
    Deployment,
    Owned,
    Resource,
    part_of,
)
from diloco_jax.launch.text import yaml_text
from diloco_jax.launch.tpu_vm import disk, permit, secret

Task = dict[str, Any]

BOOT_GB = 200
"""Gigabytes of the boot disk, with the image and the text."""
DEAD = (
    *("CANCELLED", "CANCELLING", "FAILED", "FAILED_SETUP", "FAILED_PRECHECKS"),
    *("FAILED_NO_RESOURCE", "FAILED_CONTROLLER"),
)
DONE = "SUCCEEDED"
ACCOUNT = "skypilot-v1"
"""Account that SkyPilot makes in each project for all of its machines."""


def deployment(
    order: Order, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on sky` makes and runs; see
    `tpu_vm.deployment`."""
    order = _as_skypilot(order)
    (host,) = hosts(order)
    address = f"{host}:{PORT}"
    names = {COORDINATOR: order.coordinator}
    names |= {island.name: island.resource for island in order.islands}
    tasks = {COORDINATOR: coordinator_task(order, address, now_unix)}
    for island in order.islands:
        tasks[island.name] = island_task(order, island, address, now_unix)
    status = ("diloco", "status", address, "--json", "--certificates", certificates)
    files = {f"{names[owner]}.yaml": yaml_text(tasks[owner]) for owner in tasks}
    return Deployment(
        files={**files, PERMIT: "The run may begin.\n"},
        prepare=(),
        resources=(
            *(secret(order, stem, certificates) for stem in order.secrets),
            permit(order, f"{folder}/{PERMIT}"),
            disk(order),
            *(
                _job(order, owner, n, f"{folder}/{n}.yaml")
                for owner, n in names.items()
            ),
        ),
        start=(),
        stop=(),
        logs=tuple(
            Owned(owner, Command(("sky", "jobs", "logs", "--name", n, "--no-follow")))
            for owner, n in names.items()
        ),
        statuses=(Command(status),),
        results=(),
    )


def hosts(order: Order) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator, for its certificate."""
    return (order.settings.coordinator_address,)


def account(order: Order) -> str:
    """Return the account that all machines act as."""
    return f"{ACCOUNT}@{order.settings.project}.iam.gserviceaccount.com"


def _as_skypilot(order: Order) -> Order:
    """Return the order with the account that there is, which must read the secrets."""
    settings = dataclasses.replace(
        order.settings, service_account=account(order), coordinator_account=""
    )
    return dataclasses.replace(order, settings=settings)


def island_task(
    order: Order, island: PlacedIsland, address: str, now_unix: int
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
    script = island_script(order, island, address, now_unix, ())
    places = [{"infra": _infra(zone)} for zone in island.zones]
    where: Task = {"ordered": places} if len(places) > 1 else places[0]
    return {
        "name": island.resource,
        "resources": {**wanted, **_common(order, island.name), **where},
        "config": _config(order),
        "run": _run(script),
    }


def coordinator_task(order: Order, address: str, now_unix: int) -> Task:
    """Return the coordinator's job. Its disk outlives it, and its machine's address is
    registered under its name."""
    settings = order.settings
    script = coordinator_script(order, address, now_unix, ())
    volume = {
        "name": order.coordinator,
        "path": DISK,
        "storage_type": "network",
        "attach_mode": "read_write",
        "auto_delete": False,
    }
    return {
        "name": order.coordinator,
        "resources": {
            "infra": _infra(settings.coordinator_zone),
            "instance_type": settings.coordinator_machine,
            "use_spot": False,
            **_common(order, COORDINATOR),
            "volumes": [volume],
        },
        "config": _config(order),
        "run": _run(script),
    }


def _job(order: Order, owner: str, name: str, file: str) -> Resource:
    words = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", name]
    if order.settings.internal_ips:
        words += ["--config", "gcp.use_internal_ips=true"]  # A job may not say so.
    return Resource(
        what=f"job {name}",
        owner=owner,
        find=Command(("sky", "jobs", "queue", "--all", "--output", "json")),
        create=Command((*words, file), 1800),
        delete=Command(("sky", "jobs", "cancel", "--yes", "--name", name), 600),
        job=name,
        dead=DEAD,
        ended=(DONE,) if owner == COORDINATOR else (),
        runs=True,
    )


def _infra(zone: str) -> str:
    return f"gcp/{region_of(zone)}/{zone}"


def _common(order: Order, owner: str) -> Task:
    labels = {RUN_LABEL: order.name, PART_LABEL: part_of(owner)}
    return {"disk_size": BOOT_GB, "labels": labels}


def _config(order: Order) -> Task:
    """Return the settings by which all machines are in one network."""
    subnetwork = order.settings.subnetwork
    inside = {"subnet_names": subnetwork} if subnetwork else {}
    return {"gcp": {"vpc_name": order.settings.network, **inside}}


def _run(script: str) -> str:
    """Return the commands of a job: `host.sh` until it ends for good.

    A crash is repeated on the same machines, as systemd does it on other TPU VMs; 2 and
    3 end the job as failed, and its machines are given back.
    """
    return f"""\
cat >/tmp/diloco-host.sh <<'END_OF_SCRIPT'
{script.rstrip()}
END_OF_SCRIPT
sudo /bin/bash /tmp/diloco-host.sh prepare
while true; do
  code=0
  sudo /bin/bash /tmp/diloco-host.sh run || code=$?
  case $code in 0 | 2 | 3) exit $code ;; esac
  sleep 10
done
"""
