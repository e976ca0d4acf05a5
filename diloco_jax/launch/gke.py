"""Islands on GKE: a node pool and a JobSet each, in one cluster or several; the
coordinator is a Job with a disk and a Service in one of them. So is each worker with
`launch.workers_apart`.

A node pool is one slice. It begins empty: the cluster's autoscaler buys the slice when
the JobSet's pods ask for it, again after a preemption, and gives it back when they end.
So does the coordinator's pool.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from diloco_jax.launch import manifests
from diloco_jax.launch.certificates import digest, files_of
from diloco_jax.launch.order import (
    CERTIFICATES,
    COORDINATOR,
    LOG_LINES,
    PERMIT,
    PORT,
    WORKDIR,
    Order,
    worker_host,
)
from diloco_jax.launch.placing import GkeCluster, PlacedIsland
from diloco_jax.launch.pods import ISLAND, PART, config_name
from diloco_jax.launch.resources import (
    SHARED,
    Command,
    Deployment,
    Owned,
    Resource,
    labels,
)
from diloco_jax.launch.text import yaml_text

OBJECTS = "job,service,networkpolicy,poddisruptionbudget,serviceaccount"
"""Kinds of the coordinator's objects in `coordinator.yaml`, and of a worker's."""
ISLAND_OBJECTS = "jobset,networkpolicy,serviceaccount"


def deployment(
    order: Order, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on gke` makes and runs; see
    `tpu_vm.deployment`."""
    name, settings = order.coordinator, order.settings
    service = hosts(order)[0]
    outside = f"{settings.coordinator_address or service}:{PORT}"
    files = {
        "config.yaml": yaml_text(manifests.config_map(order)),
        "disk.yaml": yaml_text(manifests.disk(order, name, COORDINATOR)),
        "coordinator.yaml": yaml_text(*manifests.coordinator(order, outside, now_unix)),
        "begin.yaml": yaml_text(manifests.permit(order)),
        "reader.yaml": yaml_text(manifests.reader(order)),
    }
    clusters = dict.fromkeys((order.cluster, *(i.cluster for i in order.islands)))
    shared = settings.namespace != "default"
    where = {COORDINATOR: order.cluster, **{i.name: i.cluster for i in order.islands}}
    made = [
        _coordinator_pool(order),
        *(pool for island in order.islands for pool in _island_pools(order, island)),
        *(_namespace(order, cluster) for cluster in clusters if shared),
        *(
            _secret(order, where[order.owner_of(stem)], stem, certificates)
            for stem in order.secrets
        ),
        *(_config_map(order, c, f"{folder}/config.yaml") for c in clusters),
        _disk(order, name, f"{folder}/disk.yaml"),
        _permit(order, f"{folder}/begin.yaml"),
        _job(order, name, f"{folder}/coordinator.yaml", ("Complete",)),
    ]
    for number, worker in enumerate(order.workers):
        part, file = manifests.part_of_worker(number), f"{worker}.yaml"
        files[f"{worker}-disk.yaml"] = yaml_text(manifests.disk(order, worker, part))
        files[file] = yaml_text(*manifests.worker(order, number, now_unix))
        made.append(_disk(order, worker, f"{folder}/{worker}-disk.yaml"))
        made.append(_job(order, worker, f"{folder}/{file}"))
    for island in order.islands:
        file = f"{island.resource}.yaml"
        near = island.cluster == order.cluster
        address = f"{service}:{PORT}" if near else outside
        files[file] = yaml_text(*manifests.island(order, island, address, now_unix))
        made.append(_jobset(order, island, f"{folder}/{file}"))
    login = ("gcloud", "container", "clusters", "get-credentials")
    inside = ("exec", f"job/{name}", "--container=diloco")
    ask = ("diloco", "status", outside, "--json", "--certificates", CERTIFICATES)
    return Deployment(
        files=files,
        prepare=tuple(Command((*login, c.name, *_cluster(c))) for c in clusters),
        resources=tuple(made),
        start=(),
        stop=(),
        logs=_logs(order),
        status=_kubectl(order, order.cluster, *inside, "--", *ask),
        results=_results(order, folder),
    )


def hosts(order: Order) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator and its workers, for
    their certificates."""
    name, address = order.coordinator, order.settings.coordinator_address
    workers = (worker_host(worker, order.settings) for worker in order.workers)
    return (
        *(f"{name}.{order.settings.namespace}.svc", name),
        *([address] if address else []),
        *workers,
    )


# ---- machines ---------------------------------------------------------------------


def _island_pools(order: Order, island: PlacedIsland) -> list[Resource]:
    """Return a node pool in each zone of the island; at most one has a slice."""
    found = island.slice
    bought = {
        "on_demand": [],
        "spot": ["--spot"],
        "reserved": [
            *("--reservation-affinity=specific", f"--reservation={island.reservation}"),
        ],
    }
    shape = [f"--tpu-topology={found.shape}"] if found.hosts > 1 else []
    return [
        _pool(
            order,
            island.cluster,
            pool,
            island.name,
            zone,
            *(f"--machine-type={found.machine_type}", *shape, *bought[island.purchase]),
            f"--max-nodes={found.hosts}",
            f"--node-labels={ISLAND}={island.resource}",
            account=order.settings.service_account,
            remedy=(
                f"{found.generation.name} is known to be offered in "
                f"{', '.join(found.generation.zones)}: set launch.zones.{island.name} "
                f"to one of them in launch.location = {island.cluster.location!r}, or "
                f"ask for quota (launch.purchase.{island.name} = {island.purchase!r})"
            ),
        )
        for pool, zone in zip(island.pools, island.zones, strict=True)
    ]


def _coordinator_pool(order: Order) -> Resource:
    settings = order.settings
    return _pool(
        order,
        order.cluster,
        order.coordinator,
        COORDINATOR,
        settings.coordinator_zone,
        f"--machine-type={settings.coordinator_machine}",
        f"--max-nodes={1 + len(order.workers)}",
        f"--node-taints={PART}={COORDINATOR}:NoSchedule",
        account=settings.coordinator_account or settings.service_account,
    )


def _pool(
    order: Order,
    cluster: GkeCluster,
    name: str,
    owner: str,
    zone: str,
    *options: str,
    account: str,
    remedy: str = "",
) -> Resource:
    pools = ("gcloud", "container", "node-pools")
    where = (f"--cluster={cluster.name}", *_cluster(cluster))
    return Resource(
        what=f"node pool {name} in {zone}",
        owner=owner,
        find=Command((*pools, "describe", name, *where, "--format=value(status)")),
        create=Command(
            (
                *(*pools, "create", name, *where, f"--node-locations={zone}", *options),
                # Machines are bought when pods ask for them, and given back after them.
                *("--num-nodes=0", "--enable-autoscaling", "--min-nodes=0"),
                f"--labels={labels(order, owner)}",
                *([f"--service-account={account}"] if account else []),
                *("--scopes=cloud-platform", "--workload-metadata=GKE_METADATA"),
            ),
            1800,
            remedy,
        ),
        delete=Command((*pools, "delete", name, *where), 1800),
        dead=("ERROR",),
    )


def _cluster(cluster: GkeCluster) -> tuple[str, ...]:
    return (
        f"--location={cluster.location}",
        f"--project={cluster.project}",
        "--quiet",
    )


# ---- objects in the clusters ------------------------------------------------------


def _jobset(order: Order, island: PlacedIsland, file: str) -> Resource:
    name, cluster = island.resource, island.cluster
    state = "jsonpath={.metadata.name} {.status.terminalState}"
    get = ("get", "jobset", name, "--ignore-not-found", "-o", state)
    return Resource(
        what=f"JobSet {name} ({island.slice.topology})",
        owner=island.name,
        find=_kubectl(order, cluster, *get),
        create=_kubectl(order, cluster, "apply", "-f", file),
        delete=_delete(order, cluster, ISLAND_OBJECTS, name),
        dead=("Failed",),
        runs=True,
    )


def _job(order: Order, name: str, file: str, ended: tuple[str, ...] = ()) -> Resource:
    """Return the coordinator, or a worker. ended: states that say that the run is
    over."""
    cluster = order.cluster
    state = 'jsonpath={.metadata.name} {.status.conditions[?(@.status=="True")].type}'
    get = ("get", "job", name, "--ignore-not-found", "-o", state)
    return Resource(
        what=f"{OBJECTS} {name}",
        owner=COORDINATOR,
        find=_kubectl(order, cluster, *get),
        create=_kubectl(order, cluster, "apply", "-f", file),
        delete=_delete(order, cluster, OBJECTS, name),
        dead=("Failed",),
        ended=ended,
        runs=True,
    )


def _disk(order: Order, name: str, file: str) -> Resource:
    kind, cluster = "persistentvolumeclaim", order.cluster
    return Resource(
        what=f"{kind} {name}",
        owner=COORDINATOR,
        find=_find(order, cluster, kind, name),
        create=_kubectl(order, cluster, "apply", "-f", file),
        delete=_delete(order, cluster, kind, name),
        keeps=True,
    )


def _permit(order: Order, file: str) -> Resource:
    """Return the Job that lets the run begin on its disk, before its coordinator comes.
    It outlives that disk."""
    name, cluster = order.permit, order.cluster
    waits = ("wait", f"job/{name}", "--for=condition=Complete", "--timeout=1800s")
    return Resource(
        what=f"job {name}",
        owner=COORDINATOR,
        find=_find(order, cluster, "job", name),
        create=_kubectl(order, cluster, "apply", "-f", file),
        delete=_delete(order, cluster, "job", name),
        keeps=True,
        content=PERMIT,
        # Its machine has to come, and the image.
        grant=(_kubectl(order, cluster, *waits, deadline_s=1900),),
    )


def _config_map(order: Order, cluster: GkeCluster, file: str) -> Resource:
    name = config_name(order)
    apply = _kubectl(order, cluster, "apply", "-f", file)
    return Resource(
        what=f"configmap {name}{_elsewhere(order, cluster)}",
        owner=SHARED,
        find=_find(order, cluster, "configmap", name),
        create=apply,
        delete=_delete(order, cluster, "configmap", name),
        content=hashlib.sha256(order.config_json.encode()).hexdigest(),
        update=(apply,),
    )


def _secret(
    order: Order, cluster: GkeCluster, stem: str, certificates: str
) -> Resource:
    name = order.secrets[stem]
    files = files_of(Path(certificates), stem)
    create = _kubectl(
        *(order, cluster, "create", "secret", "generic", name),
        *(f"--from-file={certificates}/{file}" for file in files),
    )
    delete = _delete(order, cluster, "secret", name)
    return Resource(
        what=f"secret {name}",
        owner=order.owner_of(stem),
        find=_find(order, cluster, "secret", name),
        create=create,
        delete=delete,
        content=digest(Path(certificates), stem),
        update=(delete, create),
    )


def _namespace(order: Order, cluster: GkeCluster) -> Resource:
    name = order.settings.namespace
    return Resource(
        what=f"namespace {name}{_elsewhere(order, cluster)}",
        owner=SHARED,
        find=_find(order, cluster, "namespace", name),
        create=_kubectl(order, cluster, "create", "namespace", name),
        delete=None,
    )


def _elsewhere(order: Order, cluster: GkeCluster) -> str:
    return "" if cluster == order.cluster else f" in {cluster.context}"


def _logs(order: Order) -> tuple[Owned, ...]:
    lines = f"--tail={LOG_LINES}"
    own = ("--container=diloco", lines)
    return (
        *(
            Owned(
                COORDINATOR,
                _kubectl(order, order.cluster, "logs", f"job/{name}", *own),
            )
            for name in (order.coordinator, *order.workers)
        ),
        *(
            Owned(
                island.name,
                _kubectl(
                    order,
                    island.cluster,
                    "logs",
                    f"--selector=jobset.sigs.k8s.io/jobset-name={island.resource}",
                    *("--container=diloco", "--prefix", lines),
                    f"--max-log-requests={island.slice.hosts}",
                ),
            )
            for island in order.islands
        ),
    )


def _results(order: Order, folder: str) -> tuple[Command, ...]:
    """Return the commands that copy the run's folder, from a pod beside its disk."""
    name, cluster = manifests.reader_name(order), order.cluster
    ready = ("--for=condition=Ready", "--timeout=900s")
    copy = ("cp", f"{name}:{WORKDIR}", str(Path(folder).parent / "results"))
    return (
        _kubectl(order, cluster, "apply", "-f", f"{folder}/reader.yaml"),
        _kubectl(order, cluster, "wait", f"pod/{name}", *ready, deadline_s=1000),
        _kubectl(order, cluster, *copy, "--container=diloco", deadline_s=24 * 3600),
        _delete(order, cluster, "pod", name),
    )


def _find(order: Order, cluster: GkeCluster, kind: str, name: str) -> Command:
    get = ("get", kind, name, "--ignore-not-found", "-o", "name")
    return _kubectl(order, cluster, *get)


def _delete(order: Order, cluster: GkeCluster, kinds: str, name: str) -> Command:
    delete = ("delete", kinds, name, "--ignore-not-found")
    return _kubectl(order, cluster, *delete, deadline_s=300)


def _kubectl(
    order: Order, cluster: GkeCluster, *arguments: str, deadline_s: float = 120.0
) -> Command:
    where = (f"--context={cluster.context}", f"--namespace={order.settings.namespace}")
    # After "--" comes a command in the pod.
    own = arguments.index("--") if "--" in arguments else len(arguments)
    return Command(("kubectl", *arguments[:own], *where, *arguments[own:]), deadline_s)
