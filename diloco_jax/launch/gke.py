"""Islands on GKE: a node pool and a JobSet each, in one cluster or several; the
coordinator is a Job with a disk and a Service in one of them, and so is each worker
with `launch.workers_apart`.

A node pool is one slice. It begins empty: the cluster's autoscaler buys the slice when
the JobSet's pods ask for it, again after a preemption, and gives it back when they end.
So does the pool of the coordinator.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from diloco_jax.launch import gke_looks, manifests
from diloco_jax.launch.certificates import digest, files_of
from diloco_jax.launch.kubectl import apply, delete, find, kubectl
from diloco_jax.launch.nodes import PlacedNode
from diloco_jax.launch.order import COORDINATOR, PERMIT, Order, worker_host
from diloco_jax.launch.placing import GkeCluster, PlacedIsland
from diloco_jax.launch.pods import ISLAND, PART, config_name
from diloco_jax.launch.resources import (
    SHARED,
    Command,
    Deployment,
    Resource,
    labels,
)
from diloco_jax.launch.text import yaml_text
from diloco_jax.wire import principal

OBJECTS = "job,service,networkpolicy,poddisruptionbudget,serviceaccount"
"""Kinds of the coordinator's objects in `coordinator.yaml`, and of a worker's."""
ISLAND_OBJECTS = "jobset,networkpolicy,serviceaccount"


def deployment(
    order: Order, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on gke` makes and runs; see
    `tpu_vm.deployment`."""
    files = {
        "config.yaml": yaml_text(manifests.config_map(order)),
        "begin.yaml": yaml_text(manifests.permit(order)),
    }
    nodes, islands = order.nodes, order.islands
    clusters = dict.fromkeys(
        [*(n.cluster for n in nodes), *(i.cluster for i in islands)]
    )
    shared = order.settings.namespace != "default"
    where = {node.stem: node.cluster for node in nodes}
    where |= {principal.island(i.name).stem: i.cluster for i in islands}
    made = [
        *(_node_pool(order, node) for node in nodes),
        *(pool for island in islands for pool in _island_pools(order, island)),
        *(_namespace(order, cluster) for cluster in clusters if shared),
        *(
            _secret(order, where.get(stem, order.cluster), stem, certificates)
            for stem in order.secrets
        ),
        *(_config_map(order, c, f"{folder}/config.yaml") for c in clusters),
    ]
    for node in nodes:
        name, file, disk = node.resource, f"{node.stem}.yaml", "disk.yaml"
        files[disk] = yaml_text(manifests.disk(order, name, node.stem))
        files[file] = yaml_text(*manifests.coordinator(order, node, now_unix))
        files["reader.yaml"] = yaml_text(manifests.reader(order, node))
        made.append(_disk(order, node.cluster, name, f"{folder}/{disk}"))
        made.append(_permit(order, f"{folder}/begin.yaml"))
        made.append(_job(order, node.cluster, name, f"{folder}/{file}", ("Complete",)))
    for number, worker in enumerate(order.workers):
        part, file = manifests.part_of_worker(number), f"{worker}.yaml"
        files[f"{worker}-disk.yaml"] = yaml_text(manifests.disk(order, worker, part))
        files[file] = yaml_text(*manifests.worker(order, number, now_unix))
        disk = f"{folder}/{worker}-disk.yaml"
        made.append(_disk(order, order.cluster, worker, disk))
        made.append(_job(order, order.cluster, worker, f"{folder}/{file}"))
    for island in islands:
        file = f"{island.resource}.yaml"
        files[file] = yaml_text(*manifests.island(order, island, now_unix))
        made.append(_jobset(order, island, f"{folder}/{file}"))
    login = ("gcloud", "container", "clusters", "get-credentials")
    return Deployment(
        files=files,
        prepare=tuple(Command((*login, c.name, *_cluster(c))) for c in clusters),
        resources=tuple(made),
        start=(),
        stop=(),
        logs=gke_looks.logs(order),
        statuses=gke_looks.statuses(order),
        results=gke_looks.results(order, folder),
    )


def hosts(order: Order) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator and its workers,
    for their certificates."""
    nodes = [(node.inside, node.resource, node.outside) for node in order.nodes]
    workers = (worker_host(worker, order.settings) for worker in order.workers)
    return (*(name for names in nodes for name in names if name), *workers)


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


def _node_pool(order: Order, node: PlacedNode) -> Resource:
    settings = order.settings
    workers = len(order.workers)
    return _pool(
        order,
        node.cluster,
        node.resource,
        COORDINATOR,
        node.zone,
        f"--machine-type={settings.coordinator_machine}",
        f"--max-nodes={1 + workers}",
        f"--node-taints={PART}={COORDINATOR}:NoSchedule",
        account=settings.coordinator_account or settings.service_account,
        part=node.stem,
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
    part: str = "",
) -> Resource:
    """part: of the run, in labels, if it is another one than the owner."""
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
                f"--labels={labels(order, part or owner)}",
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
        find=kubectl(order, cluster, *get),
        create=apply(order, cluster, file),
        delete=delete(order, cluster, ISLAND_OBJECTS, name),
        dead=("Failed",),
        runs=True,
    )


def _job(
    order: Order,
    cluster: GkeCluster,
    name: str,
    file: str,
    ended: tuple[str, ...] = (),
) -> Resource:
    """Return the coordinator, or a worker. ended: states that say that the
    run is over."""
    state = 'jsonpath={.metadata.name} {.status.conditions[?(@.status=="True")].type}'
    get = ("get", "job", name, "--ignore-not-found", "-o", state)
    return Resource(
        what=f"{OBJECTS} {name}",
        owner=COORDINATOR,
        find=kubectl(order, cluster, *get),
        create=apply(order, cluster, file),
        delete=delete(order, cluster, OBJECTS, name),
        dead=("Failed",),
        ended=ended,
        runs=True,
    )


def _disk(order: Order, cluster: GkeCluster, name: str, file: str) -> Resource:
    kind = "persistentvolumeclaim"
    return Resource(
        what=f"{kind} {name}",
        owner=COORDINATOR,
        find=find(order, cluster, kind, name),
        create=apply(order, cluster, file),
        delete=delete(order, cluster, kind, name),
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
        find=find(order, cluster, "job", name),
        create=apply(order, cluster, file),
        delete=delete(order, cluster, "job", name),
        keeps=True,
        content=PERMIT,
        # Its machine has to come, and the image.
        grant=(kubectl(order, cluster, *waits, deadline_s=1900),),
    )


def _config_map(order: Order, cluster: GkeCluster, file: str) -> Resource:
    name = config_name(order)
    made = apply(order, cluster, file)
    return Resource(
        what=f"configmap {name}{_elsewhere(order, cluster)}",
        owner=SHARED,
        find=find(order, cluster, "configmap", name),
        create=made,
        delete=delete(order, cluster, "configmap", name),
        content=hashlib.sha256(order.config_json.encode()).hexdigest(),
        update=(made,),
    )


def _secret(
    order: Order, cluster: GkeCluster, stem: str, certificates: str
) -> Resource:
    name = order.secrets[stem]
    files = files_of(Path(certificates), stem)
    create = kubectl(
        *(order, cluster, "create", "secret", "generic", name),
        *(f"--from-file={certificates}/{file}" for file in files),
    )
    deleted = delete(order, cluster, "secret", name)
    return Resource(
        what=f"secret {name}",
        owner=order.owner_of(stem),
        find=find(order, cluster, "secret", name),
        create=create,
        delete=deleted,
        content=digest(Path(certificates), stem),
        update=(deleted, create),
        carried=True,
    )


def _namespace(order: Order, cluster: GkeCluster) -> Resource:
    name = order.settings.namespace
    return Resource(
        what=f"namespace {name}{_elsewhere(order, cluster)}",
        owner=SHARED,
        find=find(order, cluster, "namespace", name),
        create=kubectl(order, cluster, "create", "namespace", name),
        delete=None,
    )


def _elsewhere(order: Order, cluster: GkeCluster) -> str:
    return "" if cluster == order.cluster else f" in {cluster.context}"
