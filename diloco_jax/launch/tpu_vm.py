"""Islands on TPU VMs: one queued resource each, and a CPU machine for the coordinator.

One queued resource holds one slice (`--node-id`): several nodes in one resource would
be joined into a single `jax.distributed` world. Every host of a slice boots with the
same script, `host.sh`, which keeps `diloco island` running.
"""

from __future__ import annotations

from pathlib import Path

from diloco_jax.launch.certificates import digest
from diloco_jax.launch.host import DISK, coordinator_script, island_script
from diloco_jax.launch.order import (
    CERTIFICATES,
    COORDINATOR,
    LOG_LINES,
    PERMIT,
    PORT,
    Order,
)
from diloco_jax.launch.placing import PlacedIsland
from diloco_jax.launch.resources import (
    SHARED,
    Command,
    Deployment,
    Owned,
    Resource,
    labels,
)

SLICE_PORTS = (8471, 8482)
"""Ports of libtpu and JAX, at which the hosts of a slice meet. Neither asks for a key.
"""
METRICS_PORT = 8431
"""Port of libtpu's measurements, which only its own machine needs."""
CLOSED = 2000
"""Priority of the rule that closes those ports: above that of a network which lets in
all of its machines, as `default` does, and below that of rules which open them."""
DEAD = ("FAILED", "SUSPENDING", "SUSPENDED")
ACTIVE = "ACTIVE"
"""State of a queued resource that has its slice, or had it: it is also that of a slice
which is preempted just now."""
TAKEN = ("PREEMPTED", "TERMINATED")
"""States of a slice that is lost. Spot slices do not start again."""
WELL = (ACTIVE, "READY", "HEALTHY", "HEALTH_UNSPECIFIED")
STOPPED = ("TERMINATED", "SUSPENDED")
"""States in which a machine of Compute Engine waits for a person to start it."""
WORD_LABEL = "diloco-ended"
"""Label of the disk with the coordinator's last word, which `host.sh` puts there."""
OVER = ("done", "hours")
"""Words of a coordinator whose run is over, or whose last hour is; `host.sh` has them.
"""


def deployment(
    order: Order, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on tpu_vm` makes and runs.

    Args:
      certificates: folder with `coordinator.tar` and each `island.NAME.tar`.
      folder: folder for the deployment's files.
      now_unix: first incarnation of a slice made now, above those of any slice made
        before.
    """
    (host,) = hosts(order)
    address = f"{host}:{PORT}"
    project, name = f"--project={order.settings.project}", order.coordinator
    place = f"--zone={order.settings.coordinator_zone}"
    release = ("compute", "instances", "delete", name, place, project)
    word = ("compute", "disks", "add-labels", name, place, project)
    last_word = (*word, f"--labels={WORD_LABEL}=")
    script = coordinator_script(order, address, now_unix, release, last_word)
    files = {"coordinator.sh": script, PERMIT: "The run may begin.\n"}
    made = [
        _closed(order),
        _open(order, COORDINATOR, order.coordinator, order.name, order.ports),
        *(
            _open(order, i.name, i.resource, i.resource, SLICE_PORTS)
            for i in order.islands
            if i.slice.hosts > 1
        ),
        *(secret(order, stem, certificates) for stem in order.secrets),
        permit(order, f"{folder}/{PERMIT}"),
        disk(order),
        _coordinator(order, f"{folder}/coordinator.sh"),
    ]
    for island in order.islands:
        script = f"{island.resource}.sh"
        tpu = ("compute", "tpus", "queued-resources", "delete", island.resource)
        gone = (*tpu, f"--zone={island.zone}", "--force", "--async", project)
        files[script] = island_script(order, island, address, now_unix, gone)
        times = now_unix, order.end_unix(now_unix)
        made.append(_queued_resource(order, island, f"{folder}/{script}", times))
    ask = f"sudo docker exec diloco diloco status {address} --json --certificates "
    return Deployment(
        files=files,
        prepare=(),
        resources=tuple(made),
        start=_everywhere(order, "sudo systemctl start diloco"),
        stop=tuple(reversed(_everywhere(order, "sudo systemctl stop diloco"))),
        logs=_everywhere(
            order, f"sudo journalctl --unit diloco --lines {LOG_LINES} --no-pager"
        ),
        statuses=(_everywhere(order, ask + CERTIFICATES)[0].command,),
        results=(
            gcloud(
                order,
                *("compute", "scp", "--recurse", place, *_inside(order)),
                *(f"{name}:{DISK}/run", str(Path(folder).parent / "results")),
                deadline_s=24 * 3600,
            ),
        ),
    )


def hosts(order: Order) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator, for its certificate."""
    settings = order.settings
    zone = f"{settings.coordinator_zone}.c.{settings.project}.internal"
    return (f"{order.coordinator}.{zone}",)


# ---- resources --------------------------------------------------------------------


def _queued_resource(
    order: Order, island: PlacedIsland, script: str, times: tuple[int, int]
) -> Resource:
    """Return the request for the island's slice. times: now, and the end of all
    processes or 0."""
    found = island.slice
    zone = f"--zone={island.zone}"
    kind = [f"--accelerator-type={found.accelerator_type}"]
    if not found.accelerator_type:
        kind = [f"--type={found.generation.name}", f"--topology={found.shape}"]
    now_unix, until = times
    # A request that waits longer than the run may would buy what nobody uses.
    valid = f"--valid-until-duration={max(1, until - now_unix)}s"
    bought = {"on_demand": [], "spot": ["--spot"], "reserved": ["--reserved"]}
    tpus = ("compute", "tpus", "queued-resources")
    create = gcloud(
        order,
        *(*tpus, "create", island.resource, zone, f"--node-id={island.resource}"),
        *(*kind, f"--runtime-version={found.generation.runtime_version}", "--async"),
        f"--labels={labels(order, island.name)}",
        *(*bought[island.purchase], *_network(order)),
        f"--tags={order.name},{island.resource}",
        *(["--internal-ips"] if order.settings.internal_ips else []),
        *([valid] if until else []),
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
    slices = ("compute", "tpus", "tpu-vm", "describe", island.resource, zone)
    return Resource(
        what=f"slice {island.resource} ({found.topology}) in {island.zone}",
        owner=island.name,
        find=gcloud(order, *describe, shown),
        create=create,
        # --force also deletes the machines of a slice that still exists.
        delete=gcloud(
            order, *tpus, "delete", island.resource, zone, "--force", deadline_s=900
        ),
        dead=(*DEAD, *TAKEN),
        holds=ACTIVE,
        inside=gcloud(order, *slices, "--format=value(state,health)"),
        well=WELL,
        revives=True,
    )


def _coordinator(order: Order, script: str) -> Resource:
    settings, name = order.settings, order.coordinator
    zone = f"--zone={settings.coordinator_zone}"
    address = ["--no-address"] if settings.internal_ips else []
    instances = ("compute", "instances")
    return Resource(
        what=f"machine {name} in {settings.coordinator_zone}",
        owner=COORDINATOR,
        find=gcloud(
            order, *instances, "describe", name, zone, "--format=value(status)"
        ),
        create=gcloud(
            order,
            *(*instances, "create", name, zone),
            f"--machine-type={settings.coordinator_machine}",
            *("--image-family=cos-stable", "--image-project=cos-cloud"),
            "--boot-disk-size=50GB",
            f"--disk=name={name},device-name={name},mode=rw,auto-delete=no",
            f"--labels={labels(order, COORDINATOR)}",
            *(*_network(order, "--subnet"), *address, f"--tags={name}"),
            f"--metadata-from-file=startup-script={script}",
            deadline_s=300,
        ),
        delete=gcloud(order, *instances, "delete", name, zone, deadline_s=600),
        # The disk with the run is not deleted with it.
        dead=STOPPED,
        # It deletes itself after the run, and before that tells its disk why.
        ended=OVER,
        last_word=gcloud(
            order,
            *("compute", "disks", "describe", name, zone),
            f"--format=value(labels.{WORD_LABEL})",
        ),
        revives=True,
    )


def disk(order: Order) -> Resource:
    """Return the disk that holds the run."""
    settings, name = order.settings, order.coordinator
    zone = f"--zone={settings.coordinator_zone}"
    disks = ("compute", "disks")
    return Resource(
        what=f"disk {name} in {settings.coordinator_zone}",
        owner=COORDINATOR,
        find=gcloud(order, *disks, "describe", name, zone, "--format=value(status)"),
        create=gcloud(
            order,
            *(*disks, "create", name, zone),
            *(f"--size={settings.coordinator_disk_gb}GB", "--type=pd-balanced"),
            f"--labels={labels(order, COORDINATOR)}",
        ),
        delete=gcloud(order, *disks, "delete", name, zone),
        keeps=True,
    )


def _open(
    order: Order, owner: str, tag: str, source: str, ports: tuple[int, ...]
) -> Resource:
    """Return the rule by which machines with the tag `source` reach these ports of
    machines with `tag`."""
    allowed = f"--allow={_tcp(ports)}", f"--source-tags={source}"
    return _firewall(order, owner, f"{tag}-open", tag, *allowed)


def _closed(order: Order) -> Resource:
    """Return the rule by which nobody else reaches the ports that ask for no key,
    whatever the network lets in."""
    ports = f"--rules={_tcp((*SLICE_PORTS, METRICS_PORT))}"
    denied = "--action=DENY", ports, "--source-ranges=0.0.0.0/0"
    priority = f"--priority={CLOSED}"
    return _firewall(
        order, SHARED, f"{order.name}-closed", order.name, *denied, priority
    )


def _tcp(ports: tuple[int, ...]) -> str:
    return ",".join(f"tcp:{port}" for port in ports)


def _firewall(order: Order, owner: str, name: str, tag: str, *options: str) -> Resource:
    rules = ("compute", "firewall-rules")
    return Resource(
        what=f"firewall rule {name}",
        owner=owner,
        find=gcloud(order, *rules, "describe", name, "--format=value(name)"),
        create=gcloud(
            order,
            *(*rules, "create", name, f"--network={order.settings.network}"),
            *("--direction=INGRESS", *options, f"--target-tags={tag}"),
            # Rules have no labels.
            f"--description={labels(order, owner)}",
        ),
        delete=gcloud(order, *rules, "delete", name),
    )


def secret(order: Order, stem: str, certificates: str) -> Resource:
    """Return the secret of Secret Manager with the certificates of this stem."""
    name, settings = order.secrets[stem], order.settings
    owner, account = order.owner_of(stem), settings.service_account
    if owner == COORDINATOR:
        account = settings.coordinator_account or account
    member = f"--member=serviceAccount:{account}"
    role = "--role=roles/secretmanager.secretAccessor"
    bind = ("secrets", "add-iam-policy-binding", name, member, role)
    data = f"--data-file={certificates}/{stem}.tar"
    return Resource(
        what=f"secret {name}",
        owner=owner,
        find=gcloud(order, "secrets", "describe", name, "--format=value(name)"),
        create=gcloud(
            order,
            *("secrets", "create", name, "--replication-policy=automatic", data),
            f"--labels={labels(order, owner)}",
        ),
        delete=gcloud(order, "secrets", "delete", name),
        content=digest(Path(certificates), stem),
        update=(gcloud(order, "secrets", "versions", "add", name, data),),
        carried=True,
        grant=(gcloud(order, *bind),) if account else (),
    )


def permit(order: Order, file: str) -> Resource:
    """Return the secret whose first version the coordinator destroys as it begins the
    run, so that it begins none on another disk."""
    name, settings = order.permit, order.settings
    account = settings.coordinator_account or settings.service_account
    role = "--role=roles/secretmanager.secretVersionManager"
    member = f"--member=serviceAccount:{account}"
    bind = ("secrets", "add-iam-policy-binding", name, member, role)
    return Resource(
        what=f"secret {name}",
        owner=COORDINATOR,
        find=gcloud(order, "secrets", "describe", name, "--format=value(name)"),
        create=gcloud(
            order,
            *("secrets", "create", name, "--replication-policy=automatic"),
            *(f"--data-file={file}", f"--labels={labels(order, COORDINATOR)}"),
        ),
        delete=gcloud(order, "secrets", "delete", name),
        keeps=True,
        content=PERMIT if account else "",
        grant=(gcloud(order, *bind),) if account else (),
    )


def _network(order: Order, subnetwork: str = "--subnetwork") -> list[str]:
    """Return the options for the machines' network and service account."""
    settings = order.settings
    options = [f"--network={settings.network}", "--scopes=cloud-platform"]
    if settings.subnetwork:
        options.append(f"{subnetwork}={settings.subnetwork}")
    account = settings.service_account
    if subnetwork == "--subnet":  # The coordinator's machine.
        account = settings.coordinator_account or account
    if account:
        options.append(f"--service-account={account}")
    return options


def gcloud(
    order: Order, *arguments: str, deadline_s: float = 120.0, remedy: str = ""
) -> Command:
    """Return a command in the launch's project."""
    line = ("gcloud", *arguments, f"--project={order.settings.project}", "--quiet")
    return Command(line, deadline_s, remedy)


# ---- commands on the machines -----------------------------------------


def _inside(order: Order) -> list[str]:
    return ["--tunnel-through-iap"] if order.settings.internal_ips else []


def _everywhere(order: Order, command: str) -> tuple[Owned, ...]:
    """Run a command on the coordinator's machine, then on all hosts of every island."""
    line = [f"--command={command}", *_inside(order)]
    there = f"--zone={order.settings.coordinator_zone}"
    return (
        Owned(
            COORDINATOR,
            gcloud(order, "compute", "ssh", order.coordinator, there, *line),
        ),
        *(
            Owned(
                island.name,
                gcloud(
                    order,
                    *("compute", "tpus", "queued-resources", "ssh", island.resource),
                    *(f"--zone={island.zone}", "--node=all", "--worker=all", *line),
                    deadline_s=300,
                ),
            )
            for island in order.islands
        ),
    )
