"""The Kubernetes objects of a launch, as plain values.

There is one JobSet per island, so that each restarts by itself. Labels and values are
strings.
"""

from __future__ import annotations

import shlex
from typing import Any

from diloco_jax import run_files
from diloco_jax.launch.order import (
    CERTIFICATES,
    CONFIG_FOLDER,
    COORDINATOR,
    DATA,
    INIT_WITHIN_S,
    PLATFORMS,
    PORT,
    WORKDIR,
    Order,
    PlacedIsland,
)
from diloco_jax.launch.variables import variables_of
from diloco_jax.wire import principal

Manifest = dict[str, Any]


CLOUD_IMAGE = "gcr.io/google.com/cloudsdktool/google-cloud-cli:slim"
MAX_RESTARTS = 1000
"""Crashes of an island before it is given up. Preemptions do not count if the cluster
tells them from crashes."""
NOTICE_S = {"spot": 15, "reserved": 60, "on_demand": 60}
"""Seconds from SIGTERM to SIGKILL. A Spot node has 15 s, whatever a pod asks for."""
GOODBYE_S = 5
"""Seconds of the notice that the goodbye and the end of the process need."""
STOP_S = 60
"""Seconds of notice for the coordinator, which writes a snapshot and the summary."""
TPU_PORTS = (8471, 8482, 8431)
"""Ports of libtpu, JAX and the runtime metrics."""


def jobset(order: Order, island: PlacedIsland, address: str, now_unix: int) -> Manifest:
    """Return the island's JobSet: as many pods as the slice has hosts, all or none.

    now_unix: first incarnation of this JobSet, above those of any JobSet before it.
    """
    job = {
        "parallelism": island.slice.hosts,
        "completions": island.slice.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                # Bad config, or refused by the coordinator: no attempt will help.
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "diloco",
                        "operator": "In",
                        "values": [2, 3],
                    },
                },
                {
                    "action": "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": {
            "metadata": {"labels": _labels(order, island.name)},
            "spec": _island_pod(order, island, address, now_unix),
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            **_metadata(order, island.resource, island.name),
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": (
                    "cloud.google.com/gke-nodepool"
                )
            },
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": MAX_RESTARTS,
                # No new pod starts before the last old one has released its chips.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "hopeless",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                        "onJobFailureMessagePatterns": [".*exit code [23] .*"],
                    },
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    },
                ],
            },
            "replicatedJobs": [
                {"name": "hosts", "replicas": 1, "template": {"spec": job}}
            ],
        },
    }


def coordinator(order: Order, address: str, now_unix: int) -> list[Manifest]:
    """Return service, disruption budget and StatefulSet of the coordinator, which may
    begin a run for a while after `now_unix`."""
    name, labels = order.coordinator, _labels(order, COORDINATOR)
    command = shlex.join(["diloco", *order.coordinator_arguments(address)])
    init, init_before = shlex.join(order.init_arguments()), now_unix + INIT_WITHIN_S
    script = f"""\
if [ ! -d {WORKDIR}/log ] && [ "$(date +%s)" -lt {init_before} ]; then set -- {init}; fi
trap 'asked=yes; kill -TERM $!' TERM
{command} "$@" &
code=0; wait $! || code=$?
if [ "${{asked-}}" ]; then wait $!; exit; fi
[ $code = 0 ] || exit $code
echo 'the run is over; its results are in {WORKDIR}'
exec sleep infinity
"""
    disk = {"claimName": name}
    workers = range(len(order.ports) - 2)
    names = ("control", "bulk", *(f"worker-{worker}" for worker in workers))
    volumes = [
        *_volumes(order, COORDINATOR),
        {"name": "run", "persistentVolumeClaim": disk},
    ]
    pod = {
        "terminationGracePeriodSeconds": STOP_S,
        "nodeSelector": {"cloud.google.com/gke-nodepool": name},
        **_copies_data(order),
        "containers": [
            {
                "name": "diloco",
                "image": order.settings.image,
                "command": ["/bin/bash", "-c", script],
                "env": _variables(order, COORDINATOR),
                "ports": [{"containerPort": port} for port in order.ports],
                "readinessProbe": {"tcpSocket": {"port": PORT}},
                "volumeMounts": _mounts(volumes),
            }
        ],
        "volumes": volumes,
    }
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(order, name, COORDINATOR),
            "spec": {
                "selector": labels,
                "ports": [
                    {"name": name, "port": port}
                    for name, port in zip(names, order.ports, strict=True)
                ],
            },
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": _metadata(order, name, COORDINATOR),
            "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": _metadata(order, name, COORDINATOR),
            "spec": {
                "replicas": 1,
                "serviceName": name,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels, "annotations": annotations},
                    "spec": pod,
                },
            },
        },
    ]


def disk(order: Order) -> Manifest:
    """Return the disk on which the coordinator keeps the run. The StatefulSet does not
    make it, so deleting the StatefulSet leaves the disk."""
    size = f"{order.settings.coordinator_disk_gb}Gi"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(order, order.coordinator, COORDINATOR),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
        },
    }


def config_map(order: Order) -> Manifest:
    """Return the ConfigMap from which every pod reads the config."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(order, config_name(order), "all"),
        "data": {run_files.CONFIG: order.config_json},
    }


def config_name(order: Order) -> str:
    """Return the name of the ConfigMap."""
    return f"{order.name}-config"


def _island_pod(
    order: Order, island: PlacedIsland, address: str, now_unix: int
) -> Manifest:
    notice_s = NOTICE_S[island.purchase]
    command = shlex.join(
        ["diloco", *island.arguments(address, float(notice_s - GOODBYE_S))]
    )
    # The shell adds the numbers and is replaced: signals reach `diloco` itself.
    script = f"exec {command} --incarnation $(({now_unix} + RESTART_ATTEMPT))"
    chips = {"google.com/tpu": str(island.slice.chips_per_host)}
    volumes = [
        *_volumes(order, principal.island(island.name).stem),
        {"name": "run", "emptyDir": {}},
    ]
    selector = {
        "cloud.google.com/gke-tpu-accelerator": island.slice.generation.node_label,
        "cloud.google.com/gke-tpu-topology": island.slice.shape,
        # The island's own pool: another island's pods never take part of the slice.
        "cloud.google.com/gke-nodepool": island.resource,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists"}]
    if island.purchase == "spot":
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Exists"})
    attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": notice_s,
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
                "resources": {"requests": chips, "limits": chips},
                "volumeMounts": _mounts(volumes),
            }
        ],
        "volumes": volumes,
    }


def _volumes(order: Order, stem: str) -> list[Manifest]:
    """stem: that of the certificates' files."""
    secret = {"secretName": order.secrets[stem], "defaultMode": 0o400}
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": config_name(order)}},
        {"name": "certificates", "secret": secret},
    ]
    if order.settings.data:
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
    # What is wrong with a file, `diloco` itself tells, with an exit code of its own.
    read = f"diloco manifest --missing {DATA} || true"
    mounts = [{"name": "data", "mountPath": DATA}]
    return {
        "initContainers": [
            {
                "name": "data",
                "image": CLOUD_IMAGE,
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


def _metadata(order: Order, name: str, part: str) -> Manifest:
    return {
        "name": name,
        "namespace": order.settings.namespace,
        "labels": _labels(order, part),
    }


def _labels(order: Order, part: str) -> dict[str, str]:
    return {"app": "diloco", "diloco-run": order.name, "diloco-part": part}
