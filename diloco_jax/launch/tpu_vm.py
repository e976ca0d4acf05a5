"""Islands on TPU VMs: one queued resource each, and a CPU machine for the coordinator.

One queued resource holds one slice (`--node-id`): several nodes in one resource would
be joined into a single `jax.distributed` world. Every machine boots with the same
script, `host.sh` with its settings before it, and deletes itself at the end. Nobody
makes it anew before that: for slices that come back there are GKE and SkyPilot.
"""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path
from shlex import quote
from typing import Any

from diloco_jax.config.placement import variables_of
from diloco_jax.launch.spec import (
    COORDINATOR,
    PERMIT,
    PLATFORMS,
    PORT,
    PORTS,
    ROOT,
    LaunchSpec,
    PlacedIsland,
)
from diloco_jax.launch.submit import CONTENT, SHARED, Command, Deployment, Resource
from diloco_jax.wire import peers
from diloco_jax.wire.certificates import digest

SLICE_PORTS = (8471, 8482)
"""Ports of libtpu and JAX, at which the hosts of a slice meet. Neither asks for a key.
"""
METRICS_PORT = 8431
"""Port of libtpu's measurements, which only its own machine needs."""
CLOSED = 2000
"""Priority of the rule that closes those ports: above that of a network which lets in
all of its machines, as `default` does, and below that of rules which open them."""
NOTICE_S = 25.0
"""Seconds from the notice to the goodbye. A Spot machine has about 30 s."""
DISK = "/mnt/disks/diloco"
"""Where the coordinator's disk is mounted."""
FOLLOW_S, ISLANDS_FOLLOW_S = 60, 600
"""Seconds after which the coordinator's machine, and each host of an island, looks for
changed certificates. A revocation reaches islands through the coordinator."""
LASTED_S = 600
"""Seconds of progress after which a process may crash as often again."""
DEAD = ("FAILED", "SUSPENDING", "SUSPENDED")
STOPPED = ("TERMINATED", "SUSPENDED")
"""States in which a machine of Compute Engine waits for a person to start it."""
RUN_LABEL, PART_LABEL = "diloco-run", "diloco-part"
"""Labels of what costs money."""


def deployment(
    spec: LaunchSpec, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on tpu_vm` makes.

    Args:
      certificates: folder with `coordinator.tar` and each `island.NAME.tar`.
      folder: folder for the deployment's files.
      now_unix: the last hour counts from then.
    """
    (host,) = hosts(spec)
    address, project = f"{host}:{PORT}", f"--project={spec.settings.project}"
    zone = f"--zone={spec.settings.coordinator_zone}"
    release = ("compute", "instances", "delete", spec.coordinator, zone, project)
    files = {
        "coordinator.sh": coordinator_script(spec, address, now_unix, release),
        PERMIT: "The run may begin.\n",
    }
    islands = []
    for island in spec.islands:
        script = f"{island.resource}.sh"
        tpu = ("compute", "tpus", "queued-resources", "delete", island.resource)
        gone = (*tpu, f"--zone={island.zones[0]}", "--force", "--async", project)
        files[script] = island_script(spec, island, address, now_unix, gone)
        islands.append(_queued_resource(spec, island, f"{folder}/{script}"))
    return Deployment(
        files=files,
        resources=(
            *_rules(spec),
            *kept(spec, certificates, f"{folder}/{PERMIT}"),
            _coordinator(spec, f"{folder}/coordinator.sh"),
            *islands,
        ),
    )


def hosts(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator, for its certificate."""
    settings = spec.settings
    zone = f"{settings.coordinator_zone}.c.{settings.project}.internal"
    return (f"{spec.coordinator}.{zone}",)


def kept(spec: LaunchSpec, certificates: str, permit: str) -> tuple[Resource, ...]:
    """Return what machines without Kubernetes need beside themselves: the secrets with
    certificates, the permit to begin the run, and the disk that holds it.

    certificates: folder with STEM.tar. permit: file with what the permit says. The
    coordinator destroys its secret's first version as it begins the run, so that it
    begins none on another disk.
    """
    made = []
    for stem, name in spec.secrets.items():
        owner, file = spec.owner_of(stem), f"{certificates}/{stem}.tar"
        content = digest(Path(certificates), stem)
        made.append(_secret(spec, name, owner, file, content, "secretAccessor"))
    begins = COORDINATOR, permit, PERMIT, "secretVersionManager"
    return (*made, _secret(spec, spec.permit, *begins, keeps=True), _disk(spec))


def part_of(owner: str) -> str:
    """Return the label of a part of the run."""
    return re.sub(r"[^-_a-z0-9]", "-", owner.lower()) or "shared"


# ---- what there is ------------------------------------------------------------------


def _queued_resource(spec: LaunchSpec, island: PlacedIsland, script: str) -> Resource:
    """Return the request for the island's slice."""
    found, settings, zone = island.slice, spec.settings, island.zones[0]
    kind = f"--accelerator-type={found.accelerator_type}"
    if not found.accelerator_type:
        kind = f"--type={found.generation.type_name} --topology={found.shape}"
    bought = {"on_demand": "", "spot": "--spot", "reserved": "--reserved"}
    # A request that waits longer than the run may would buy what nobody uses.
    valid = f"--valid-until-duration={max(1, round(settings.max_hours * 3600))}s"
    return _made(
        spec,
        "compute tpus queued-resources",
        f"{island.resource} --zone={zone}",
        f"--node-id={island.resource} {kind} "
        f"--runtime-version={found.generation.runtime_version} --async "
        f"--labels={_labels(spec, island.name)} {bought[island.purchase]} "
        f"{_network(spec, '--subnetwork', island.name)} "
        f"--tags={spec.name},{island.resource} "
        f"{'--internal-ips' if settings.internal_ips else ''} "
        f"{valid if settings.max_hours else ''} "
        f"--metadata-from-file=startup-script={quote(script)}",
        shown="state.state,state.failedData.error.message",
        # It also deletes the machines of a slice that still exists.
        forced="--force",
        deadlines_s=(120, 900),
        remedy=(
            f"{island.offered}, or ask for quota in {zone} "
            f"(launch.purchase.{island.name} = {island.purchase!r})"
        ),
        what=f"slice {island.resource} ({found.topology}) in {zone}",
        owner=island.name,
        dead=DEAD,
    )


def _coordinator(spec: LaunchSpec, script: str) -> Resource:
    """Return the coordinator's machine. The run's disk is not deleted with it."""
    settings, name = spec.settings, spec.coordinator
    return _made(
        spec,
        "compute instances",
        f"{name} --zone={settings.coordinator_zone}",
        f"--machine-type={settings.coordinator_machine} "
        f"--image-family=cos-stable --image-project=cos-cloud --boot-disk-size=50GB "
        f"--disk=name={name},device-name={name},mode=rw,auto-delete=no "
        f"--labels={_labels(spec, COORDINATOR)} "
        f"{_network(spec, '--subnet', COORDINATOR)} "
        f"{'--no-address' if settings.internal_ips else ''} --tags={name} "
        f"--metadata-from-file=startup-script={quote(script)}",
        deadlines_s=(300, 600),
        what=f"machine {name} in {settings.coordinator_zone}",
        owner=COORDINATOR,
        dead=STOPPED,
    )


def _disk(spec: LaunchSpec) -> Resource:
    settings, name = spec.settings, spec.coordinator
    return _made(
        spec,
        "compute disks",
        f"{name} --zone={settings.coordinator_zone}",
        f"--size={settings.coordinator_disk_gb}GB --type=pd-balanced "
        f"--labels={_labels(spec, COORDINATOR)}",
        what=f"disk {name} in {settings.coordinator_zone}",
        owner=COORDINATOR,
        keeps=True,
    )


def _network(spec: LaunchSpec, subnetwork: str, owner: str) -> str:
    """Return the options for a machine's network and service account."""
    settings, account = spec.settings, spec.account_of(owner)
    options = f"--network={quote(settings.network)} --scopes=cloud-platform"
    if settings.subnetwork:
        options += f" {subnetwork}={quote(settings.subnetwork)}"
    return options + (f" --service-account={quote(account)}" if account else "")


def _rules(spec: LaunchSpec) -> tuple[Resource, ...]:
    """Return the rules by which islands reach the coordinator, and the hosts of a slice
    each other; and nobody else the ports that ask for no key, whatever the network lets
    in."""
    closed = (
        f"--action=DENY --rules={_tcp((*SLICE_PORTS, METRICS_PORT))} "
        f"--source-ranges=0.0.0.0/0 --priority={CLOSED}"
    )
    opened = [(COORDINATOR, spec.coordinator, spec.name, PORTS)]
    for island in spec.islands:
        if island.slice.hosts > 1:
            own = island.resource
            opened.append((island.name, own, own, SLICE_PORTS))
    return (
        _firewall(spec, SHARED, f"{spec.name}-closed", spec.name, closed),
        *(
            _firewall(
                *(spec, owner, f"{tag}-open", tag),
                f"--allow={_tcp(ports)} --source-tags={source}",
            )
            for owner, tag, source, ports in opened
        ),
    )


def _tcp(ports: tuple[int, ...]) -> str:
    return ",".join(f"tcp:{port}" for port in ports)


def _firewall(
    spec: LaunchSpec, owner: str, name: str, tag: str, options: str
) -> Resource:
    """Return a rule. Its description has what other things have as labels."""
    return _made(
        spec,
        "compute firewall-rules",
        name,
        f"--network={quote(spec.settings.network)} --direction=INGRESS {options} "
        f"--target-tags={tag} --description={_labels(spec, owner)}",
        shown="name",
        what=f"firewall rule {name}",
        owner=owner,
    )


def _secret(
    spec: LaunchSpec,
    name: str,
    owner: str,
    file: str,
    content: str,
    role: str,
    *,
    keeps: bool = False,
) -> Resource:
    """Return a secret of Secret Manager. It gets its label last: broken off before
    that, it has no content that is known. keeps: its content never changes."""
    file, account = quote(file), spec.account_of(owner)
    last = [_gcloud(spec, f"secrets update {name} --update-labels={CONTENT}={content}")]
    if account:
        bind = (
            f"secrets add-iam-policy-binding {name} "
            f"--member=serviceAccount:{quote(account)} "
            f"--role=roles/secretmanager.{role}"
        )
        last.insert(0, _gcloud(spec, bind))
    add = _gcloud(spec, f"secrets versions add {name} --data-file={file}")
    return _made(
        spec,
        "secrets",
        name,
        f"--replication-policy=automatic --data-file={file} "
        f"--labels={_labels(spec, owner)}",
        then=tuple(last),
        shown=f"name,labels.{CONTENT}",
        what=f"secret {name}",
        owner=owner,
        content=content,
        update=(*([] if keeps else [add]), *last),
        keeps=keeps,
    )


def _labels(spec: LaunchSpec, owner: str) -> str:
    """Return the labels of what costs money, as `gcloud` takes them."""
    return f"{RUN_LABEL}={spec.name},{PART_LABEL}={part_of(owner)}"


def _made(
    spec: LaunchSpec,
    nouns: str,
    name: str,
    options: str,
    *,
    then: tuple[Command, ...] = (),
    shown: str = "status",
    forced: str = "",
    deadlines_s: tuple[float, float] = (120.0, 120.0),
    remedy: str = "",
    **fields: Any,
) -> Resource:
    """Return what `gcloud NOUNS create NAME OPTIONS` makes.

    name: with its zone. then: commands after it. shown: fields of its state. forced:
    options of `delete`. deadlines_s: of making and deleting it. fields: those of the
    resource.
    """
    made_s, deleted_s = deadlines_s
    create = f"{nouns} create {name} {options}"
    delete = f"{nouns} delete {name} {forced}"
    return Resource(
        find=_gcloud(spec, f"{nouns} describe {name} '--format=value({shown})'"),
        create=(_gcloud(spec, create, deadline_s=made_s, remedy=remedy), *then),
        delete=_gcloud(spec, delete, deadline_s=deleted_s, deletes=True),
        **fields,
    )


def _gcloud(spec: LaunchSpec, line: str, **how: Any) -> Command:
    """Return a command in the launch's project. line: as people type it. how: fields of
    the command."""
    project = f"--project={spec.settings.project}"
    return Command(("gcloud", *shlex.split(line), project, "--quiet"), **how)


# ---- the script of a machine --------------------------------------------------------


def island_script(
    spec: LaunchSpec,
    island: PlacedIsland,
    address: str,
    now_unix: int,
    release: tuple[str, ...],
) -> str:
    """Return the script of the island's hosts.

    release: arguments of `gcloud` that give the machines back; empty = SkyPilot does.
    """
    return _script(
        spec,
        island.name,
        peers.island(island.name).stem,
        spec.island_arguments(island, address, NOTICE_S),
        now_unix,
        release,
        ROLE="island",
        FOLLOW_S=str(ISLANDS_FOLLOW_S),
        PLATFORMS=PLATFORMS,
    )


def coordinator_script(
    spec: LaunchSpec, address: str, now_unix: int, release: tuple[str, ...]
) -> str:
    """Return the script of the coordinator's machine; see `island_script`."""
    return _script(
        spec,
        COORDINATOR,
        COORDINATOR,
        spec.coordinator_arguments(address),
        now_unix,
        release,
        ROLE=COORDINATOR,
        FOLLOW_S=str(FOLLOW_S),
        BEGIN=spec.permit,
        PERMIT=f"{DISK}/{PERMIT}",
        SOURCE=spec.source,
        PORTS=" ".join(map(str, PORTS)),
        DEVICE=f"/dev/disk/by-id/google-{spec.coordinator}",
        DISK=DISK,
        DNS_ZONE=spec.settings.dns_zone if not release else "",
        ADDRESS=spec.settings.coordinator_address,
    )


def _script(
    spec: LaunchSpec,
    owner: str,
    stem: str,
    arguments: tuple[str, ...],
    now_unix: int,
    release: tuple[str, ...],
    **settings: str,
) -> str:
    """Return `host.sh` with its settings before it. owner: whose variables it gives to
    the process. stem: of its certificates."""
    plain, secret = variables_of(spec.settings, owner)
    deletes = spec.settings.when_done == "delete"
    variables = [f"--env={name}={value}" for name, value in plain.items()]
    secrets = [part for pair in secret.items() for part in pair]
    settings |= {
        "ROOT": ROOT,
        "PROJECT": spec.settings.project,
        "IMAGE": spec.settings.image,
        "CLOUD_IMAGE": spec.settings.cloud_image,
        "SECRET": spec.secrets[stem],
        "DATA": spec.settings.data,
        "END": str(spec.end_unix(now_unix)),
        "RUN": spec.name,
        "PART": owner,
        "FRUITLESS_STARTS": str(spec.fruitless_starts),
        "LASTED_S": str(LASTED_S),
    }
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"{name}={shlex.quote(value)}" for name, value in settings.items()),
            f"ARGUMENTS=({shlex.join(arguments)})",
            f"VARIABLES=({shlex.join(variables)})",
            f"SECRETS=({shlex.join(secrets)})",
            f"RELEASE=({shlex.join(release) if deletes else ''})",
            f"CONFIG_JSON={shlex.quote(spec.config_json)}",
            resources.files("diloco_jax.launch").joinpath("host.sh").read_text(),
        ]
    )
