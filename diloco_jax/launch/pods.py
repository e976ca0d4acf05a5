"""The pods of a launch, as plain values. Labels and values are strings."""

from __future__ import annotations

import shlex
from typing import Any

from diloco_jax.config.launch import variables_of
from diloco_jax.hardware.machines import GIB, machine_of
from diloco_jax.hardware.slices import HOST_MACHINES
from diloco_jax.launch import pod_scripts
from diloco_jax.launch.nodes import PlacedNode
from diloco_jax.launch.order import (
    CERTIFICATES,
    CONFIG_FOLDER,
    COORDINATOR,
    DATA,
    PLATFORMS,
    PORT,
    WORKDIR,
    Order,
)
from diloco_jax.launch.placing import PlacedIsland
from diloco_jax.launch.pod_scripts import PERMIT_FILE, ended_at, told_apart
from diloco_jax.wire import principal

Manifest = dict[str, Any]

NOTICE_S = {"spot": 15, "reserved": 60, "on_demand": 60}
"""Seconds from SIGTERM to SIGKILL. A Spot node has 15 s, whatever a pod asks for."""
GOODBYE_S = 5
"""Seconds of the notice that the goodbye and the end of the process need."""
STOP_S = 60
"""Seconds of notice for the coordinator, which writes a snapshot and the summary."""
TPU_PORTS = (8471, 8482, 8431)
"""Ports of libtpu, JAX and the runtime metrics."""
REQUESTED = 0.8
"""Share of a machine that its one pod asks for. The rest is the node's own."""
PART, ISLAND = "diloco-part", "diloco-island"
"""Taint of the coordinator's pool; label of an island's pools."""
POOL = "cloud.google.com/gke-nodepool"


def coordinator_pod(order: Order, node: PlacedNode, now_unix: int) -> Manifest:
    """Return the pod of the coordinator. now_unix: its last hour counts from
    then."""
    address = f"{node.host}:{PORT}"
    command = shlex.join(["diloco", *order.coordinator_arguments(address)])
    start = ended_at(f'{command} "$@"', order.end_unix(now_unix), STOP_S)
    init = shlex.join(order.init_arguments())
    script = f"""\
if [ -d {WORKDIR}/log ]; then rm -f {PERMIT_FILE}; fi
if [ -e {PERMIT_FILE} ]; then set -- {init}; fi
{_served(order, start)}"""
    return _serving_pod(order, node, node.resource, node.stem, script, order.ports)


def _served(order: Order, start: str) -> str:
    """Return the lines of a coordinator; see `told_apart`."""
    lasted, most = pod_scripts.COORDINATOR_LASTED, order.fruitless_starts
    return told_apart(start, lasted, most, pod_scripts.NOT_COMPLETE)


def permit_pod(order: Order) -> Manifest:
    """Return the pod that lets the run begin on the disk that there is then."""
    volumes = [_disk(order.coordinator)]
    put = f"[ -d {WORKDIR}/log ] || touch {PERMIT_FILE}; sync"
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        **_on_node_of(order.nodes[0]),
        "containers": [
            {
                "name": "diloco",
                "image": order.settings.image,
                "command": ["/bin/bash", "-c", put],
                "volumeMounts": _mounts(volumes),
            }
        ],
        "volumes": volumes,
    }


def worker_pod(order: Order, worker: int, now_unix: int) -> Manifest:
    """Return the pod of a worker on a machine of its own."""
    command = shlex.join(["diloco", *order.worker_arguments(worker)])
    script = told_apart(
        ended_at(command, order.end_unix(now_unix), STOP_S),
        pod_scripts.WORKER_LASTED,
        order.fruitless_starts,
        pod_scripts.NOT_COMPLETE,
    )
    stem = principal.worker(worker).stem
    name, ports = order.workers[worker], (PORT, PORT + 1)
    return _serving_pod(order, order.nodes[0], name, stem, script, ports)


def _serving_pod(
    order: Order,
    node: PlacedNode,
    name: str,
    stem: str,
    script: str,
    ports: tuple[int, ...],
) -> Manifest:
    """Return a pod with a disk and a machine for itself, in the node's pool. name: of
    all that is made for it. stem: of its certificates."""
    leads = stem == node.stem
    volumes = [*_volumes(order, stem), _disk(name)]
    machine = machine_of(order.settings.coordinator_machine)
    size = _requests(machine.cores, machine.memory / GIB)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": STOP_S,
        **_identity(name),
        **_on_node_of(node),
        **(_copies_data(order) if leads else {}),
        "containers": [
            {
                "name": "diloco",
                "image": order.settings.image,
                "command": ["/bin/bash", "-c", script],
                "env": _variables(order, COORDINATOR),
                "ports": [{"containerPort": port} for port in ports],
                "readinessProbe": {"tcpSocket": {"port": PORT}},
                "resources": {"requests": size},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": _mounts(volumes),
            }
        ],
        "volumes": volumes,
    }


def reader_pod(order: Order, node: PlacedNode) -> Manifest:
    """Return a pod from which a node's workdir can be copied, beside the coordinator or
    after it."""
    volumes = [_disk(node.resource)]
    return {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": 24 * 3600,
        "automountServiceAccountToken": False,
        **_on_node_of(node),
        "containers": [
            {
                "name": "diloco",
                "image": order.settings.image,
                "command": ["/bin/sleep", "infinity"],
                "volumeMounts": _mounts(volumes),
            }
        ],
        "volumes": volumes,
    }


def island_pod(order: Order, island: PlacedIsland, now_unix: int) -> Manifest:
    """Return the pod that runs on every host of the island's slice."""
    notice_s = NOTICE_S[island.purchase]
    dials = [f"{node.host_for(island.cluster)}:{PORT}" for node in order.nodes]
    goodbye_after_s = float(notice_s - GOODBYE_S)
    arguments = order.island_arguments(island, dials[0], goodbye_after_s)
    command = shlex.join(["diloco", *arguments])
    counted = f"{command} --incarnation $(({now_unix} + RESTART_ATTEMPT))"
    script = told_apart(
        ended_at(counted, order.end_unix(now_unix), notice_s),
        pod_scripts.ISLAND_LASTED,
        order.fruitless_starts,
    )
    chips = {"google.com/tpu": str(island.slice.chips_per_host)}
    size = _requests(*HOST_MACHINES[island.slice.machine_type])
    volumes = [
        *_volumes(order, principal.island(island.name).stem),
        {"name": "run", "emptyDir": {}},
    ]
    selector = {
        "cloud.google.com/gke-tpu-accelerator": island.slice.generation.node_label,
        "cloud.google.com/gke-tpu-topology": island.slice.shape,
        # The island's own pools: another island's pods never take part of the slice.
        **(
            {ISLAND: island.resource} if falls_back(island) else {POOL: island.resource}
        ),
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists"}]
    if island.purchase == "spot":
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Exists"})
    attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": notice_s,
        **_identity(island.resource),
        "nodeSelector": selector,
        "tolerations": tolerations,
        **_copies_data(order),
        "containers": [
            {
                "name": "diloco",
                "image": order.settings.image,
                "command": ["/bin/bash", "-c", script],
                "env": [
                    {
                        "name": "RESTART_ATTEMPT",
                        "valueFrom": {"fieldRef": {"fieldPath": attempt}},
                    },
                    # Without TPUs the island fails; it does not train on the CPU.
                    {"name": "JAX_PLATFORMS", "value": PLATFORMS},
                    *_variables(order, island.name),
                ],
                "ports": [{"containerPort": port} for port in TPU_PORTS],
                "resources": {"requests": {**size, **chips}, "limits": chips},
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": _mounts(volumes),
            }
        ],
        "volumes": volumes,
    }


def falls_back(island: PlacedIsland) -> bool:
    """True if the island has a pool in each of several zones."""
    return len(island.zones) > 1


def config_name(order: Order) -> str:
    """Return the name of the ConfigMap."""
    return f"{order.name}-config"


def _identity(name: str) -> Manifest:
    """name: of the pod's service account."""
    return {
        "serviceAccountName": name,
        # `diloco` asks nothing of the cluster.
        "automountServiceAccountToken": False,
    }


def _on_node_of(node: PlacedNode) -> Manifest:
    return {
        "nodeSelector": {POOL: node.resource},
        "tolerations": [{"key": PART, "operator": "Equal", "value": COORDINATOR}],
    }


def _requests(cores: int, gib: float) -> dict[str, str]:
    memory = round(REQUESTED * gib)
    return {"cpu": str(round(REQUESTED * cores)), "memory": f"{memory}Gi"}


def _disk(claimed: str) -> Manifest:
    claim = {"claimName": claimed}
    return {"name": "run", "persistentVolumeClaim": claim}


def _volumes(order: Order, stem: str) -> list[Manifest]:
    """stem: that of the certificates' files."""
    secret = {"secretName": order.secrets[stem], "defaultMode": 0o400}
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": config_name(order)}},
        {"name": "certificates", "secret": secret},
    ]
    if order.settings.data and not stem.startswith("worker"):
        volumes.append({"name": "data", "emptyDir": {}})
    return volumes


def _mounts(volumes: list[Manifest]) -> list[Manifest]:
    places = {
        "config": CONFIG_FOLDER,
        "certificates": CERTIFICATES,
        "data": DATA,
        "run": WORKDIR,
    }
    return [
        {"name": volume["name"], "mountPath": places[volume["name"]]}
        for volume in volumes
    ]


def _variables(order: Order, owner: str) -> list[Manifest]:
    """Return the launch's variables for a part of the run. A secret's key is the name
    of the variable."""
    plain, secret = variables_of(order.settings, owner)
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *(
            {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": kept, "key": name}},
            }
            for name, kept in secret.items()
        ),
    ]


def _copies_data(order: Order) -> Manifest:
    """Return the init part of a pod, which fetches the text before anything else, and
    makes the manifests that did not come with it."""
    if not order.settings.data:
        return {}
    copy = ["gcloud", "storage", "rsync", "--recursive", order.settings.data, DATA]
    # `diloco` itself tells what is wrong with a file, with an exit code of its own.
    read = f"diloco manifest --missing {DATA} || true"
    mounts = [{"name": "data", "mountPath": DATA}]
    return {
        "initContainers": [
            {
                "name": "data",
                "image": order.settings.cloud_image,
                "command": copy,
                "volumeMounts": mounts,
            },
            {
                "name": "manifests",
                "image": order.settings.image,
                "command": ["/bin/bash", "-c", read],
                "volumeMounts": mounts,
            },
        ]
    }
