"""Islands on TPU VMs: one queued resource each, and a CPU machine for the coordinator.

One queued resource holds one slice (`--node-id`): several nodes in one resource would
be joined into a single `jax.distributed` world. Every host of a slice boots with the
same script, `host.sh`, which keeps `diloco island` running.
"""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path

from diloco_jax.launch.certificates import digest
from diloco_jax.launch.order import (
    COORDINATOR,
    INIT_WITHIN_S,
    PLATFORMS,
    PORT,
    ROOT,
    Order,
    PlacedIsland,
)
from diloco_jax.launch.resources import SHARED, Command, Deployment, Owned, Resource
from diloco_jax.launch.variables import variables_of
from diloco_jax.wire import principal

NOTICE_S = 25.0
"""Seconds from the notice to the goodbye. A Spot machine has about 30 s."""
CLOUD_IMAGE = "gcr.io/google.com/cloudsdktool/google-cloud-cli:slim"
DISK = "/mnt/disks/diloco"
SLICE_PORTS = (8471, 8482, 8431)
"""Ports within a slice, of libtpu, JAX and runtime metrics."""
LOG_LINES = 100
DEAD = ("FAILED", "SUSPENDING", "SUSPENDED")


def deployment(
    order: Order, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on tpu_vm` makes and runs.

    Args:
      certificates: folder with `coordinator.tar` and each `island.NAME.tar`.
      folder: folder for the deployment's files.
      now_unix: first incarnation of a slice made now, above those of any slice made
        before. A coordinator made now may begin a run for a while.
    """
    (host,) = hosts(order)
    address = f"{host}:{PORT}"
    files = {"coordinator.sh": _coordinator_script(order, address, now_unix)}
    made = [
        _firewall(order),
        *(_secret(order, stem, certificates) for stem in order.secrets),
        _disk(order),
        _coordinator(order, f"{folder}/coordinator.sh"),
    ]
    for island in order.islands:
        script = f"{island.resource}.sh"
        files[script] = _island_script(order, island, address, now_unix)
        made.append(_queued_resource(order, island, f"{folder}/{script}"))
    return Deployment(
        files=files,
        prepare=(),
        resources=tuple(made),
        start=_everywhere(order, "sudo systemctl start diloco"),
        stop=tuple(reversed(_everywhere(order, "sudo systemctl stop diloco"))),
        logs=_everywhere(
            order, f"sudo journalctl --unit diloco --lines {LOG_LINES} --no-pager"
        ),
    )


def hosts(order: Order) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator, for its certificate."""
    settings = order.settings
    zone = f"{settings.coordinator_zone}.c.{settings.project}.internal"
    return (f"{order.coordinator}.{zone}",)


# ---- resources --------------------------------------------------------------------


def _queued_resource(order: Order, island: PlacedIsland, script: str) -> Resource:
    found = island.slice
    zone = f"--zone={island.zone}"
    kind = [f"--accelerator-type={found.accelerator_type}"]
    if not found.accelerator_type:
        kind = [f"--type={found.generation.name}", f"--topology={found.shape}"]
    bought = {"on_demand": [], "spot": ["--spot"], "reserved": ["--reserved"]}
    tpus = ("compute", "tpus", "queued-resources")
    create = _gcloud(
        order,
        *(*tpus, "create", island.resource, zone, f"--node-id={island.resource}"),
        *(*kind, f"--runtime-version={found.generation.runtime_version}", "--async"),
        *(*bought[island.purchase], *_network(order), f"--tags={order.name}"),
        *(["--internal-ips"] if order.settings.internal_ips else []),
        f"--metadata-from-file=startup-script={script}",
        remedy=(
            f"{found.generation.name} is known to be offered in "
            f"{', '.join(found.generation.zones)}: set launch.zones.{island.name} to "
            f"one of them, or ask for quota in {island.zone} "
            f"(launch.purchase.{island.name} = {island.purchase!r})"
        ),
    )
    describe = (*tpus, "describe", island.resource, zone)
    shown = "--format=value(state.state,state.failedData.error.message)"
    return Resource(
        what=f"slice {island.resource} ({found.topology}) in {island.zone}",
        owner=island.name,
        find=_gcloud(order, *describe, shown),
        create=create,
        # --force also deletes the machines of a slice that still exists.
        delete=_gcloud(
            order, *tpus, "delete", island.resource, zone, "--force", deadline_s=900
        ),
        dead=DEAD,
    )


def _coordinator(order: Order, script: str) -> Resource:
    settings, name = order.settings, order.coordinator
    zone = f"--zone={settings.coordinator_zone}"
    address = ["--no-address"] if settings.internal_ips else []
    instances = ("compute", "instances")
    return Resource(
        what=f"machine {name} in {settings.coordinator_zone}",
        owner=COORDINATOR,
        find=_gcloud(
            order, *instances, "describe", name, zone, "--format=value(status)"
        ),
        create=_gcloud(
            order,
            *(*instances, "create", name, zone),
            f"--machine-type={settings.coordinator_machine}",
            *("--image-family=cos-stable", "--image-project=cos-cloud"),
            "--boot-disk-size=50GB",
            f"--disk=name={name},device-name={name},mode=rw,auto-delete=no",
            *(*_network(order, "--subnet"), *address, f"--tags={order.name}"),
            f"--metadata-from-file=startup-script={script}",
            deadline_s=300,
        ),
        delete=_gcloud(order, *instances, "delete", name, zone, deadline_s=600),
    )


def _disk(order: Order) -> Resource:
    settings, name = order.settings, order.coordinator
    zone = f"--zone={settings.coordinator_zone}"
    disks = ("compute", "disks")
    return Resource(
        what=f"disk {name} in {settings.coordinator_zone}",
        owner=COORDINATOR,
        find=_gcloud(order, *disks, "describe", name, zone, "--format=value(status)"),
        create=_gcloud(
            order,
            *(*disks, "create", name, zone),
            *(f"--size={settings.coordinator_disk_gb}GB", "--type=pd-balanced"),
        ),
        delete=_gcloud(order, *disks, "delete", name, zone),
        keeps=True,
    )


def _firewall(order: Order) -> Resource:
    rules = ("compute", "firewall-rules")
    allowed = ",".join(f"tcp:{port}" for port in (*order.ports, *SLICE_PORTS))
    return Resource(
        what=f"firewall rule {order.name}",
        owner=SHARED,
        find=_gcloud(order, *rules, "describe", order.name, "--format=value(name)"),
        create=_gcloud(
            order,
            *(*rules, "create", order.name, f"--network={order.settings.network}"),
            *("--direction=INGRESS", f"--allow={allowed}"),
            *(f"--source-tags={order.name}", f"--target-tags={order.name}"),
        ),
        delete=_gcloud(order, *rules, "delete", order.name),
    )


def _secret(order: Order, stem: str, certificates: str) -> Resource:
    name = order.secrets[stem]
    data = f"--data-file={certificates}/{stem}.tar"
    return Resource(
        what=f"secret {name}",
        owner=order.owner_of(stem),
        find=_gcloud(order, "secrets", "describe", name, "--format=value(name)"),
        create=_gcloud(
            order,
            *("secrets", "create", name, "--replication-policy=automatic", data),
        ),
        delete=_gcloud(order, "secrets", "delete", name),
        content=digest(Path(certificates), stem),
        update=(_gcloud(order, "secrets", "versions", "add", name, data),),
    )


def _network(order: Order, subnetwork: str = "--subnetwork") -> list[str]:
    """Return the options for the machines' network and service account."""
    settings = order.settings
    options = [f"--network={settings.network}", "--scopes=cloud-platform"]
    if settings.subnetwork:
        options.append(f"{subnetwork}={settings.subnetwork}")
    if settings.service_account:
        options.append(f"--service-account={settings.service_account}")
    return options


def _gcloud(
    order: Order, *arguments: str, deadline_s: float = 120.0, remedy: str = ""
) -> Command:
    line = ("gcloud", *arguments, f"--project={order.settings.project}", "--quiet")
    return Command(line, deadline_s, remedy)


# ---- commands and scripts on the machines -----------------------------------------


def _everywhere(order: Order, command: str) -> tuple[Owned, ...]:
    """Run a command on the coordinator's machine, then on all hosts of every island."""
    inside = ["--tunnel-through-iap"] if order.settings.internal_ips else []
    line = [f"--command={command}", *inside]
    there = f"--zone={order.settings.coordinator_zone}"
    return (
        Owned(
            COORDINATOR,
            _gcloud(order, "compute", "ssh", order.coordinator, there, *line),
        ),
        *(
            Owned(
                island.name,
                _gcloud(
                    order,
                    *("compute", "tpus", "queued-resources", "ssh", island.resource),
                    *(f"--zone={island.zone}", "--node=all", "--worker=all", *line),
                    deadline_s=300,
                ),
            )
            for island in order.islands
        ),
    )


def _island_script(
    order: Order, island: PlacedIsland, address: str, now_unix: int
) -> str:
    return _script(
        order,
        "island",
        island.name,
        island.arguments(address, NOTICE_S),
        FIRST_INCARNATION=str(now_unix),
        PLATFORMS=PLATFORMS,
    )


def _coordinator_script(order: Order, address: str, now_unix: int) -> str:
    return _script(
        order,
        COORDINATOR,
        COORDINATOR,
        order.coordinator_arguments(address),
        INIT_BEFORE=str(now_unix + INIT_WITHIN_S),
        SOURCE=order.source,
        PORTS=" ".join(map(str, order.ports)),
        DEVICE=f"/dev/disk/by-id/google-{order.coordinator}",
        DISK=DISK,
    )


def _script(
    order: Order,
    role: str,
    owner: str,
    arguments: tuple[str, ...],
    **settings: str,
) -> str:
    """Return `host.sh` with its settings before it. owner: whose variables and
    certificates it gives to the process."""
    stem = principal.island(owner).stem if role == "island" else COORDINATOR
    plain, secret = variables_of(order.settings, owner)
    variables = [f"--env={name}={value}" for name, value in plain.items()]
    secrets = [part for pair in secret.items() for part in pair]
    settings = {
        "ROLE": role,
        "ROOT": ROOT,
        "PROJECT": order.settings.project,
        "IMAGE": order.settings.image,
        "CLOUD_IMAGE": CLOUD_IMAGE,
        "SECRET": order.secrets[stem],
        "DATA": order.settings.data,
        **settings,
    }
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"{name}={shlex.quote(value)}" for name, value in settings.items()),
            f"ARGUMENTS=({shlex.join(arguments)})",
            f"VARIABLES=({shlex.join(variables)})",
            f"SECRETS=({shlex.join(secrets)})",
            f"CONFIG_JSON={shlex.quote(order.config_json)}",
            resources.files("diloco_jax.launch").joinpath("host.sh").read_text(),
        ]
    )
