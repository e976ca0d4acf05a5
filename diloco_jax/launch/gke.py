"""Islands on GKE: a node pool and a JobSet each; the coordinator is a StatefulSet with
a disk and a Service in the same cluster.

A node pool is one slice. It begins empty: the cluster's autoscaler buys the slice when
the JobSet's pods ask for it, again after a preemption, and gives it back when they end.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from diloco_jax.launch import manifests
from diloco_jax.launch.certificates import digest
from diloco_jax.launch.order import COORDINATOR, PORT, Order, PlacedIsland
from diloco_jax.launch.resources import SHARED, Command, Deployment, Owned, Resource

LOG_LINES = 100
OBJECTS = "statefulset,service,poddisruptionbudget"
"""Kinds of the coordinator's objects in `coordinator.yaml`."""


def deployment(
    order: Order, certificates: str, folder: str, now_unix: int
) -> Deployment:
    """Return all that `diloco launch --on gke` makes and runs; see
    `tpu_vm.deployment`."""
    settings, name = order.settings, order.coordinator
    service, _ = hosts(order)
    address = f"{service}:{PORT}"
    files = {
        "config.yaml": _yaml(manifests.config_map(order)),
        "disk.yaml": _yaml(manifests.disk(order)),
        "coordinator.yaml": _yaml(*manifests.coordinator(order, address, now_unix)),
    }
    made = [
        _coordinator_pool(order),
        *(_island_pool(order, island) for island in order.islands),
        *([_namespace(order)] if settings.namespace != "default" else []),
        *(_secret(order, stem, certificates) for stem in order.secrets),
        _config_map(order, f"{folder}/config.yaml"),
        _object(
            *(order, f"{folder}/disk.yaml", "persistentvolumeclaim", name, COORDINATOR),
            keeps=True,
        ),
        _object(order, f"{folder}/coordinator.yaml", OBJECTS, name, COORDINATOR),
    ]
    for island in order.islands:
        file = f"{island.resource}.yaml"
        files[file] = _yaml(manifests.jobset(order, island, address, now_unix))
        made.append(_jobset(order, island, f"{folder}/{file}"))
    login = ("gcloud", "container", "clusters", "get-credentials", settings.cluster)
    scale = ("scale", "statefulset", name)
    return Deployment(
        files=files,
        prepare=(Command((*login, *_cluster(order))),),
        resources=tuple(made),
        start=(Owned(COORDINATOR, _kubectl(order, *scale, "--replicas=1")),),
        stop=(Owned(COORDINATOR, _kubectl(order, *scale, "--replicas=0")),),
        logs=_logs(order),
    )


def hosts(order: Order) -> tuple[str, ...]:
    """Return the names by which islands reach the coordinator, for its certificate."""
    return (f"{order.coordinator}.{order.settings.namespace}.svc", order.coordinator)


# ---- machines ---------------------------------------------------------------------


def _island_pool(order: Order, island: PlacedIsland) -> Resource:
    found = island.slice
    bought = {
        "on_demand": [],
        "spot": ["--spot"],
        "reserved": [
            *("--reservation-affinity=specific", f"--reservation={island.reservation}"),
        ],
    }
    shape = [f"--tpu-topology={found.shape}"] if found.hosts > 1 else []
    return _pool(
        order,
        island.resource,
        island.name,
        island.zone,
        *(f"--machine-type={found.machine_type}", *shape, *bought[island.purchase]),
        *("--num-nodes=0", "--enable-autoscaling", "--min-nodes=0"),
        f"--max-nodes={found.hosts}",
        remedy=(
            f"{found.generation.name} is known to be offered in "
            f"{', '.join(found.generation.zones)}: set launch.zones.{island.name} to "
            f"one of them in launch.location = {order.settings.location!r}, or ask for "
            f"quota (launch.purchase.{island.name} = {island.purchase!r})"
        ),
    )


def _coordinator_pool(order: Order) -> Resource:
    settings = order.settings
    return _pool(
        order,
        order.coordinator,
        COORDINATOR,
        settings.coordinator_zone,
        *(f"--machine-type={settings.coordinator_machine}", "--num-nodes=1"),
    )


def _pool(
    order: Order, name: str, owner: str, zone: str, *options: str, remedy: str = ""
) -> Resource:
    pools = ("gcloud", "container", "node-pools")
    where = (f"--cluster={order.settings.cluster}", *_cluster(order))
    account = order.settings.service_account
    return Resource(
        what=f"node pool {name} in {zone}",
        owner=owner,
        find=Command((*pools, "describe", name, *where, "--format=value(status)")),
        create=Command(
            (
                *(*pools, "create", name, *where, f"--node-locations={zone}", *options),
                *([f"--service-account={account}"] if account else []),
                "--scopes=cloud-platform",
            ),
            1800,
            remedy,
        ),
        delete=Command((*pools, "delete", name, *where), 1800),
        dead=("ERROR",),
    )


def _cluster(order: Order) -> tuple[str, ...]:
    settings = order.settings
    where = (f"--location={settings.location}", f"--project={settings.project}")
    return (*where, "--quiet")


# ---- objects in the cluster -------------------------------------------------------


def _jobset(order: Order, island: PlacedIsland, file: str) -> Resource:
    name = island.resource
    state = "jsonpath={.metadata.name} {.status.terminalState}"
    return Resource(
        what=f"JobSet {name} ({island.slice.topology})",
        owner=island.name,
        find=_kubectl(order, "get", "jobset", name, "--ignore-not-found", "-o", state),
        create=_kubectl(order, "apply", "-f", file),
        delete=_delete(order, "jobset", name),
        dead=("Failed",),
        runs=True,
    )


def _object(
    order: Order, file: str, kinds: str, name: str, owner: str, *, keeps: bool = False
) -> Resource:
    """Return the objects of one name in one file; `find` looks for the first kind."""
    first = kinds.partition(",")[0]
    return Resource(
        what=f"{kinds} {name}",
        owner=owner,
        find=_find(order, first, name),
        create=_kubectl(order, "apply", "-f", file),
        delete=_delete(order, kinds, name),
        keeps=keeps,
    )


def _config_map(order: Order, file: str) -> Resource:
    name = manifests.config_name(order)
    apply = _kubectl(order, "apply", "-f", file)
    return Resource(
        what=f"configmap {name}",
        owner=SHARED,
        find=_find(order, "configmap", name),
        create=apply,
        delete=_delete(order, "configmap", name),
        content=hashlib.sha256(order.config_json.encode()).hexdigest(),
        update=(apply,),
    )


def _secret(order: Order, stem: str, certificates: str) -> Resource:
    name = order.secrets[stem]
    files = ("ca.pem", f"{stem}.pem", f"{stem}.key")
    create = _kubectl(
        order,
        *("create", "secret", "generic", name),
        *(f"--from-file={certificates}/{file}" for file in files),
    )
    delete = _delete(order, "secret", name)
    return Resource(
        what=f"secret {name}",
        owner=order.owner_of(stem),
        find=_find(order, "secret", name),
        create=create,
        delete=delete,
        content=digest(Path(certificates), stem),
        update=(delete, create),
    )


def _namespace(order: Order) -> Resource:
    name = order.settings.namespace
    return Resource(
        what=f"namespace {name}",
        owner=SHARED,
        find=_find(order, "namespace", name),
        create=_kubectl(order, "create", "namespace", name),
        delete=None,
    )


def _logs(order: Order) -> tuple[Owned, ...]:
    lines = f"--tail={LOG_LINES}"
    return (
        Owned(
            COORDINATOR,
            _kubectl(order, "logs", f"statefulset/{order.coordinator}", lines),
        ),
        *(
            Owned(
                island.name,
                _kubectl(
                    order,
                    "logs",
                    f"--selector=jobset.sigs.k8s.io/jobset-name={island.resource}",
                    *("--container=diloco", "--prefix", lines),
                    f"--max-log-requests={island.slice.hosts}",
                ),
            )
            for island in order.islands
        ),
    )


def _find(order: Order, kind: str, name: str) -> Command:
    return _kubectl(order, "get", kind, name, "--ignore-not-found", "-o", "name")


def _delete(order: Order, kinds: str, name: str) -> Command:
    return _kubectl(order, "delete", kinds, name, "--ignore-not-found", deadline_s=300)


def _kubectl(order: Order, *arguments: str, deadline_s: float = 120.0) -> Command:
    settings = order.settings
    context = f"gke_{settings.project}_{settings.location}_{settings.cluster}"
    where = (f"--context={context}", f"--namespace={settings.namespace}")
    return Command(("kubectl", *arguments, *where), deadline_s)


# ---- as text ----------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Dumper that writes scripts and files as blocks of lines, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _yaml(*objects: dict[str, Any]) -> str:
    text: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)
    return text
