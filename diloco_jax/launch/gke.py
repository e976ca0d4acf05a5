"""Islands on GKE: a node pool and a JobSet each, in one cluster or several; the
coordinator is a Job with a disk and a Service in one of them. So is each worker with
`launch.workers_apart`.

A node pool is one slice. It begins empty: the cluster's autoscaler buys the slice when
the JobSet's pods ask for it, again after a preemption, and gives it back when they end.
So does the pool of the coordinator.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from diloco_jax.launch import manifests
from diloco_jax.launch.certificates import digest, files_of
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
from diloco_jax.wire import principal

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
    where = {principal.island(i.name).stem: i.cluster for i in islands}
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
    login = ("gcloud", "container", "clusters", "get-credentials")
    return Deployment(
        files=files,
        prepare=tuple(Command((*login, c.name, *_cluster(c))) for c in clusters),
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


# ---- machines -----------------------------------------------------------------------


def _island_pools(spec: LaunchSpec, island: PlacedIsland) -> list[Resource]:
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
            spec,
            island.cluster,
            pool,
            island.name,
            zone,
            *(f"--machine-type={found.machine_type}", *shape, *bought[island.purchase]),
            f"--max-nodes={found.hosts}",
            f"--node-labels={ISLAND}={island.resource}",
            account=spec.settings.service_account,
            remedy=(
                f"{found.generation.name} is known to be offered in "
                f"{', '.join(found.generation.zones)}: set launch.zones.{island.name} "
                f"to one of them in launch.location = {island.cluster.location!r}, or "
                f"ask for quota (launch.purchase.{island.name} = {island.purchase!r})"
            ),
        )
        for pool, zone in zip(island.pools, island.zones, strict=True)
    ]


def _coordinators_pool(spec: LaunchSpec) -> Resource:
    settings = spec.settings
    return _pool(
        spec,
        spec.cluster,
        spec.coordinator,
        COORDINATOR,
        settings.coordinator_zone,
        f"--machine-type={settings.coordinator_machine}",
        f"--max-nodes={1 + len(spec.workers)}",
        f"--node-taints={PART}={COORDINATOR}:NoSchedule",
        account=spec.coordinators_account,
    )


def _pool(
    spec: LaunchSpec,
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
    create = Command(
        (
            *(*pools, "create", name, *where, f"--node-locations={zone}", *options),
            # Machines are bought when pods ask for them, and given back after them.
            *("--num-nodes=0", "--enable-autoscaling", "--min-nodes=0"),
            f"--labels={RUN_LABEL}={spec.name},{PART_LABEL}={part_of(owner)}",
            *([f"--service-account={account}"] if account else []),
            *("--scopes=cloud-platform", "--workload-metadata=GKE_METADATA"),
        ),
        1800,
        remedy,
    )
    return Resource(
        what=f"node pool {name} in {zone}",
        owner=owner,
        find=Command((*pools, "describe", name, *where, "--format=value(status)")),
        create=(create,),
        delete=Command((*pools, "delete", name, *where), 1800, deletes=True),
        dead=("ERROR",),
    )


def _cluster(cluster: GkeCluster) -> tuple[str, ...]:
    where = (f"--location={cluster.location}", f"--project={cluster.project}")
    return (*where, "--quiet")


# ---- objects in the clusters --------------------------------------------------------


def _jobset(spec: LaunchSpec, island: PlacedIsland, file: str) -> Resource:
    name, cluster = island.resource, island.cluster
    pods = f"--selector=jobset.sigs.k8s.io/jobset-name={name}"
    most = f"--max-log-requests={island.slice.hosts}"
    return _made(
        *(spec, cluster, ISLAND_OBJECTS, name, NAME + " {.status.terminalState}"),
        _apply(spec, cluster, file),
        owner=island.name,
        dead=("Failed",),
        runs=True,
        logs=_logs(spec, cluster, "--prefix", pods, most),
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
    where = spec.cluster, "persistentvolumeclaim", name, NAME
    return _made(spec, *where, _apply(spec, spec.cluster, file), keeps=True)


def _permit(spec: LaunchSpec, file: str) -> Resource:
    """Return the Job that lets the run begin on its disk, before its coordinator comes.
    It outlives that disk."""
    name, cluster = spec.permit, spec.cluster
    until = ("--for=condition=Complete", "--timeout=1800s")
    # Its machine has to come, and the image.
    wait = _kubectl(spec, cluster, "wait", f"job/{name}", *until, deadline_s=1900)
    where, made = (spec, cluster, "job", name, STATE), _apply(spec, cluster, file)
    return _made(
        *where,
        *(made, wait),
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
    files = files_of(Path(certificates), stem)
    create = _kubectl(
        *(spec, cluster, "create", "secret", "generic", name),
        *(f"--from-file={certificates}/{file}" for file in files),
    )
    label = _kubectl(spec, cluster, "label", "secret", name, f"{CONTENT}={content}")
    where, owner = (cluster, "secret", name, LABELLED), spec.owner_of(stem)
    made = create, label
    update = _delete(spec, cluster, "secret", name), *made
    return _made(spec, *where, *made, owner=owner, content=content, update=update)


def _namespace(spec: LaunchSpec, cluster: GkeCluster) -> Resource:
    name = spec.settings.namespace
    create = _kubectl(spec, cluster, "create", "namespace", name)
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
    get = ("get", kinds.partition(",")[0], name, "--ignore-not-found")
    elsewhere = "" if cluster == spec.cluster else f" in {cluster.context}"
    return Resource(
        what=f"{kinds} {name}{elsewhere}",
        owner=owner,
        find=_kubectl(spec, cluster, *get, "-o", f"jsonpath={shown}"),
        create=create,
        delete=_delete(spec, cluster, kinds, name),
        **fields,
    )


# ---- looks at a run -----------------------------------------------------------------


def _status(spec: LaunchSpec) -> Command:
    """Return the command that asks the coordinator, in its own pod."""
    inside = ("exec", f"job/{spec.coordinator}", "--container=diloco", "--")
    host = spec.settings.coordinator_address or spec.inside
    ask = ("diloco", "status", f"{host}:{PORT}", "--json")
    line = (*inside, *ask, "--certificates", CERTIFICATES)
    return _kubectl(spec, spec.cluster, *line)


def _logs(spec: LaunchSpec, cluster: GkeCluster, *pods: str) -> Command:
    """Return the command that prints the last lines of a process."""
    words = ("logs", "--container=diloco", f"--tail={LOG_LINES}", *pods)
    return _kubectl(spec, cluster, *words)


def _results(spec: LaunchSpec, folder: str) -> tuple[Command, ...]:
    """Return the commands that copy the coordinator's workdir, from a pod beside its
    disk."""
    name, cluster = manifests.reader_name(spec), spec.cluster
    ready = ("--for=condition=Ready", "--timeout=900s")
    copy = ("cp", f"{name}:{WORKDIR}", str(Path(folder).parent / RESULTS))
    return (
        _apply(spec, cluster, f"{folder}/reader.yaml"),
        _kubectl(spec, cluster, "wait", f"pod/{name}", *ready, deadline_s=1000),
        _kubectl(spec, cluster, *copy, "--container=diloco", deadline_s=24 * 3600),
        _delete(spec, cluster, "pod", name),
    )


# ---- kubectl ------------------------------------------------------------------------


def _kubectl(
    spec: LaunchSpec, cluster: GkeCluster, *arguments: str, **how: Any
) -> Command:
    """Return a command in the cluster, and in the launch's namespace. how: fields of
    the command."""
    where = (f"--context={cluster.context}", f"--namespace={spec.settings.namespace}")
    # After "--" comes a command in the pod.
    own = arguments.index("--") if "--" in arguments else len(arguments)
    return Command(("kubectl", *arguments[:own], *where, *arguments[own:]), **how)


def _apply(spec: LaunchSpec, cluster: GkeCluster, file: str) -> Command:
    """Return the command that makes the objects of a file."""
    return _kubectl(spec, cluster, "apply", "-f", file)


def _delete(spec: LaunchSpec, cluster: GkeCluster, kinds: str, name: str) -> Command:
    """Return the command that deletes the objects of that name, and waits for it."""
    words = ("delete", kinds, name, "--ignore-not-found")
    return _kubectl(spec, cluster, *words, deadline_s=300, deletes=True)
