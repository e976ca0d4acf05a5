"""Islands on GKE: a node pool and a JobSet each, in one cluster or several; the
coordinator is a Job with a disk and a Service in one of them. So is each worker with
`placement.workers` above 1.

A node pool is one slice. It begins empty: the cluster's autoscaler buys the slice when
the JobSet's pods ask for it, again after a preemption, and gives it back when they end.
So does the pool of the coordinator.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from shlex import quote
from typing import Any

from diloco_jax.config.placement import region_of
from diloco_jax.launch import manifests
from diloco_jax.launch.manifests import ISLAND, PART, yaml_text
from diloco_jax.launch.spec import (
    CERTIFICATES,
    COORDINATOR,
    PORT,
    WORKDIR,
    GkeCluster,
    LaunchSpec,
    PlacedIsland,
    in_cluster,
)
from diloco_jax.launch.submit import (
    CONTENT,
    SHARED,
    Command,
    Deployment,
    Resource,
)
from diloco_jax.launch.tpu_vm import PART_LABEL, RUN_LABEL, part_of
from diloco_jax.wire import peers
from diloco_jax.wire.certificates import digest, files_of

OBJECTS = "job,service,networkpolicy,poddisruptionbudget,serviceaccount"
"""Kinds of the coordinator's objects in `coordinator.yaml`, and of a worker's."""
ISLAND_OBJECTS = "jobset,networkpolicy,serviceaccount"
NAME = "{.metadata.name}"
STATE = NAME + ' {.status.conditions[?(@.status=="True")].type}'
"""JSONPath of an object's name, and of what is true of a Job."""
LABELLED = f"{NAME} {{.metadata.labels.{CONTENT}}}"
RESULTS = "results"
"""Folder of the workdir with the copy of the run's folder."""
LOG_LINES = 100
"""Last lines of each process that `--action logs` shows."""


def deployment(
    spec: LaunchSpec, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on gke` makes and runs; see
    `tpu_vm.deployment`."""
    home, islands, name = spec.cluster, spec.islands, spec.coordinator
    clusters = dict.fromkeys([home, *(island.cluster for island in islands)])
    where = {peers.island(i.name).stem: i.cluster for i in islands}
    shared = spec.settings.namespace != "default"
    files = {
        "config.yaml": yaml_text(manifests.config_map(spec)),
        "begin.yaml": yaml_text(manifests.permit(spec)),
        "disk.yaml": yaml_text(manifests.disk(spec, name, COORDINATOR)),
        "coordinator.yaml": yaml_text(*manifests.coordinator(spec, now_unix)),
        "reader.yaml": yaml_text(manifests.reader(spec)),
    }
    for number, worker in enumerate(spec.workers):
        part = manifests.part_of_worker(number)
        made = manifests.worker(spec, number, now_unix)
        files[f"{worker}-disk.yaml"] = yaml_text(manifests.disk(spec, worker, part))
        files[f"{worker}.yaml"] = yaml_text(*made)
    for island in islands:
        made = manifests.island(spec, island, now_unix)
        files[f"{island.resource}.yaml"] = yaml_text(*made)
    return Deployment(
        files=files,
        prepare=tuple(map(_login, clusters)),
        resources=(
            _coordinators_pool(spec),
            *(pool for island in islands for pool in _island_pools(spec, island)),
            *(_namespace(spec, cluster) for cluster in clusters if shared),
            *(
                _secret(spec, where.get(stem, home), stem, certificates)
                for stem in spec.secrets
            ),
            *(_config_map(spec, c, f"{folder}/config.yaml") for c in clusters),
            _disk(spec, name, f"{folder}/disk.yaml"),
            _permit(spec, f"{folder}/begin.yaml"),
            _job(spec, name, f"{folder}/coordinator.yaml"),
            *(
                made
                for worker in spec.workers
                for made in (
                    _disk(spec, worker, f"{folder}/{worker}-disk.yaml"),
                    _job(spec, worker, f"{folder}/{worker}.yaml"),
                )
            ),
            *(_jobset(spec, i, f"{folder}/{i.resource}.yaml") for i in islands),
        ),
        status=_status(spec),
        results=_results(spec, folder),
    )


def hosts(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator and its workers, for
    their certificates."""
    names = (spec.inside, spec.coordinator, spec.settings.coordinator_address)
    workers = (in_cluster(worker, spec.settings) for worker in spec.workers)
    return (*filter(None, names), *workers)


def _login(cluster: GkeCluster) -> Command:
    line = f"gcloud container clusters get-credentials {cluster.name} {_place(cluster)}"
    return Command(tuple(shlex.split(line)))


# ---- machines -----------------------------------------------------------------------


def _island_pools(spec: LaunchSpec, island: PlacedIsland) -> list[Resource]:
    """Return a node pool in each zone of the island; at most one has a slice. Before
    them, where the generation is placed by one, the policy that says what they are."""
    found, generation = island.slice, island.slice.generation
    policies = [_policy(island)] if generation.by_policy and found.hosts > 1 else []
    placed = f"--placement-policy={island.resource}"
    if not policies:
        placed = f"--tpu-topology={found.shape}" if found.hosts > 1 else ""
    bought = {
        "on_demand": "",
        "spot": "--spot",
        "reserved": f"--reservation-affinity=specific "
        f"--reservation={quote(island.reservation)}",
    }
    options = (
        f"--machine-type={found.machine_type} {placed} "
        f"{bought[island.purchase]} --max-nodes={found.hosts} "
        f"--node-labels={ISLAND}={island.resource}"
    )
    remedy = (
        f"{island.offered} in launch.location = {island.cluster.location!r}, or ask "
        f"for quota (launch.purchase.{island.name} = {island.purchase!r})"
    )
    pools = [
        _pool(spec, island.cluster, pool, island.name, zone, options, remedy)
        for pool, zone in zip(island.pools, island.zones, strict=True)
    ]
    return [*policies, *pools]


def _policy(island: PlacedIsland) -> Resource:
    """Return the workload policy by which the cloud places a slice of several hosts."""
    region, name = region_of(island.zones[0]), island.resource

    def line(verb: str, words: str = "", **how: Any) -> Command:
        project = quote(island.cluster.project)
        where = f"--region={region} --project={project} --quiet"
        line = f"gcloud compute resource-policies {verb} {name} {where} {words}"
        return Command(tuple(shlex.split(line)), **how)

    return Resource(
        what=f"workload policy {name} in {region}",
        owner=island.name,
        find=line("describe", "'--format=value(status)'"),
        create=(
            line(
                "create workload-policy",
                f"--type=HIGH_THROUGHPUT --accelerator-topology={island.slice.shape}",
            ),
        ),
        delete=line("delete", deletes=True),
    )


def _coordinators_pool(spec: LaunchSpec) -> Resource:
    name, zone = spec.coordinator, spec.settings.coordinator_zone
    options = (
        f"--machine-type={spec.settings.coordinator_machine} "
        f"--max-nodes={1 + len(spec.workers)} "
        f"--node-taints={PART}={COORDINATOR}:NoSchedule"
    )
    return _pool(spec, spec.cluster, name, COORDINATOR, zone, options)


def _pool(
    spec: LaunchSpec,
    cluster: GkeCluster,
    name: str,
    owner: str,
    zone: str,
    options: str,
    remedy: str = "",
) -> Resource:
    """Return a node pool, whose machines are bought when pods ask for them, and given
    back after them."""

    def line(verb: str, words: str, **how: Any) -> Command:
        where = f"--cluster={cluster.name} {_place(cluster)}"
        line = f"gcloud container node-pools {verb} {name} {where} {words}"
        return Command(tuple(shlex.split(line)), **how)

    account = spec.account_of(owner)
    created = (
        f"--node-locations={zone} {options} --num-nodes=0 --enable-autoscaling "
        f"--min-nodes=0 --labels={RUN_LABEL}={spec.name},{PART_LABEL}={part_of(owner)} "
        f"{f'--service-account={quote(account)}' if account else ''} "
        f"--scopes=cloud-platform --workload-metadata=GKE_METADATA"
    )
    return Resource(
        what=f"node pool {name} in {zone}",
        owner=owner,
        find=line("describe", "'--format=value(status)'"),
        create=(line("create", created, deadline_s=1800, remedy=remedy),),
        delete=line("delete", "", deadline_s=1800, deletes=True),
        dead=("ERROR",),
    )


def _place(cluster: GkeCluster) -> str:
    where = f"--location={quote(cluster.location)} --project={quote(cluster.project)}"
    return f"{where} --quiet"


# ---- objects in the clusters --------------------------------------------------------


def _jobset(spec: LaunchSpec, island: PlacedIsland, file: str) -> Resource:
    name, cluster = island.resource, island.cluster
    pods = (
        f"--prefix --selector=jobset.sigs.k8s.io/jobset-name={name} "
        f"--max-log-requests={island.slice.hosts}"
    )
    return _made(
        *(spec, cluster, ISLAND_OBJECTS, name, NAME + " {.status.terminalState}"),
        _apply(spec, cluster, file),
        owner=island.name,
        dead=("Failed",),
        runs=True,
        logs=_logs(spec, cluster, pods),
    )


def _job(spec: LaunchSpec, name: str, file: str) -> Resource:
    """Return the coordinator, or a worker."""
    cluster = spec.cluster
    return _made(
        *(spec, cluster, OBJECTS, name, STATE, _apply(spec, cluster, file)),
        dead=("Failed",),
        runs=True,
        logs=_logs(spec, cluster, f"job/{name}"),
    )


def _disk(spec: LaunchSpec, name: str, file: str) -> Resource:
    kind, cluster = "persistentvolumeclaim", spec.cluster
    disk = _made(
        spec, cluster, kind, name, NAME, _apply(spec, cluster, file), keeps=True
    )
    if name != spec.coordinator:
        return disk
    # A copy of the results that broke off leaves its pod, and that holds the disk.
    reader = f"pod/{manifests.reader_name(spec)}"
    delete = _delete(spec, cluster, reader, f"{kind}/{name}")
    return dataclasses.replace(disk, delete=delete)


def _permit(spec: LaunchSpec, file: str) -> Resource:
    """Return the Job that lets the run begin on its disk, before its coordinator comes.
    It outlives that disk."""
    cluster, until = spec.cluster, "--for=condition=Complete --timeout=1800s"
    # Its machine has to come, and the image.
    line = f"wait job/{spec.permit} {until}"
    wait = _kubectl(spec, cluster, line, deadline_s=1900)
    return _made(
        *(spec, cluster, "job", spec.permit, STATE),
        *(_apply(spec, cluster, file), wait),
        dead=("Failed",),
        content="Complete",
        update=(wait,),
        keeps=True,
    )


def _config_map(spec: LaunchSpec, cluster: GkeCluster, file: str) -> Resource:
    made, content = _apply(spec, cluster, file), manifests.config_digest(spec)
    where = cluster, "configmap", manifests.config_name(spec), LABELLED
    return _made(spec, *where, made, owner=SHARED, content=content, update=(made,))


def _secret(
    spec: LaunchSpec, cluster: GkeCluster, stem: str, certificates: str
) -> Resource:
    """Return the secret with the certificates of this stem. It gets its label last:
    broken off before that, it has no content that is known."""
    name, content = spec.secrets[stem], digest(Path(certificates), stem)
    files = " ".join(
        quote(f"--from-file={certificates}/{file}")
        for file in files_of(Path(certificates), stem)
    )
    label = f"label secret {name} {CONTENT}={content}"
    made = (
        _kubectl(spec, cluster, f"create secret generic {name} {files}"),
        _kubectl(spec, cluster, label),
    )
    where, owner = (cluster, "secret", name, LABELLED), spec.owner_of(stem)
    update = _delete(spec, cluster, "secret", name), *made
    return _made(spec, *where, *made, owner=owner, content=content, update=update)


def _namespace(spec: LaunchSpec, cluster: GkeCluster) -> Resource:
    name = spec.settings.namespace
    create = _kubectl(spec, cluster, f"create namespace {name}")
    made = _made(spec, cluster, "namespace", name, NAME, create, owner=SHARED)
    return dataclasses.replace(made, delete=None)


def _made(
    spec: LaunchSpec,
    cluster: GkeCluster,
    kinds: str,
    name: str,
    shown: str,
    *create: Command,
    owner: str = COORDINATOR,
    **fields: Any,
) -> Resource:
    """Return objects of one name. kinds: the first is looked at. shown: JSONPath."""
    elsewhere = "" if cluster == spec.cluster else f" in {cluster.context}"
    get = f"get {kinds.partition(',')[0]} {name} --ignore-not-found"
    output = quote(f"jsonpath={shown}")
    return Resource(
        what=f"{kinds} {name}{elsewhere}",
        owner=owner,
        find=_kubectl(spec, cluster, f"{get} -o {output}"),
        create=create,
        delete=_delete(spec, cluster, kinds, name),
        **fields,
    )


# ---- looks at a run -----------------------------------------------------------------


def _status(spec: LaunchSpec) -> Command:
    """Return the command that asks the coordinator, in its own pod."""
    host = spec.settings.coordinator_address or spec.inside
    line = f"exec job/{spec.coordinator} --container=diloco"
    ask = f"diloco status {host}:{PORT} --json --certificates {CERTIFICATES}"
    return _kubectl(spec, spec.cluster, line, inside=("--", *ask.split()))


def _logs(spec: LaunchSpec, cluster: GkeCluster, pods: str) -> Command:
    """Return the command that prints the last lines of a process."""
    return _kubectl(spec, cluster, f"logs --container=diloco --tail={LOG_LINES} {pods}")


def _results(spec: LaunchSpec, folder: str) -> tuple[Command, ...]:
    """Return the commands that copy the coordinator's workdir, from a pod beside its
    disk."""
    name, cluster = manifests.reader_name(spec), spec.cluster
    wait = f"wait pod/{name} --for=condition=Ready --timeout=900s"
    there = quote(str(Path(folder).parent / RESULTS))
    copy = f"cp {name}:{WORKDIR} {there} --container=diloco"
    return (
        _apply(spec, cluster, f"{folder}/reader.yaml"),
        _kubectl(spec, cluster, wait, deadline_s=1000),
        _kubectl(spec, cluster, copy, deadline_s=24 * 3600),
        _delete(spec, cluster, "pod", name),
    )


# ---- kubectl ------------------------------------------------------------------------


def _kubectl(
    spec: LaunchSpec,
    cluster: GkeCluster,
    line: str,
    *,
    inside: tuple[str, ...] = (),
    **how: Any,
) -> Command:
    """Return a command in the cluster, and in the launch's namespace. line: as people
    type it. inside: a command in the pod. how: fields of the command."""
    where = (f"--context={cluster.context}", f"--namespace={spec.settings.namespace}")
    return Command(("kubectl", *shlex.split(line), *where, *inside), **how)


def _apply(spec: LaunchSpec, cluster: GkeCluster, file: str) -> Command:
    """Return the command that makes the objects of a file."""
    return _kubectl(spec, cluster, f"apply -f {quote(file)}")


def _delete(spec: LaunchSpec, cluster: GkeCluster, kinds: str, name: str) -> Command:
    """Return the command that deletes the objects of that name, and waits for it."""
    line = f"delete {kinds} {name} --ignore-not-found"
    return _kubectl(spec, cluster, line, deadline_s=300, deletes=True)
