"""The Kubernetes objects of a launch, as plain values.

There is one JobSet per island, so that each restarts by itself. Labels and values are
strings.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from diloco_jax import run_files
from diloco_jax.launch.nodes import PlacedNode
from diloco_jax.launch.order import PERMIT, PORT, Order
from diloco_jax.launch.placing import PlacedIsland
from diloco_jax.launch.pod_scripts import LASTED_CODE
from diloco_jax.launch.pods import (
    POOL,
    Manifest,
    config_name,
    coordinator_pod,
    falls_back,
    island_pod,
    permit_pod,
    reader_pod,
    worker_pod,
)

HOPELESS = {
    "action": "FailJob",
    "onExitCodes": {"containerName": "diloco", "operator": "In", "values": [2, 3]},
}
"""Bad config, or refused by the coordinator: no attempt will help."""
LASTED = {
    "containerName": "diloco",
    "operator": "In",
    "values": [LASTED_CODE],
}
"""A crash after lasting progress, which counts to no limit."""
DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
"""Addresses of nodes and pods of other clusters."""


def island(order: Order, island: PlacedIsland, now_unix: int) -> list[Manifest]:
    """Return the island's account, the policy that closes its ports to all others, and
    its JobSet."""
    name = island.resource
    labels = _labels(order, island.name)
    own: list[Manifest] = [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    if island.offer_ports:
        own.append(_islands_may(order, island.offer_ports))
    return [
        _account(order, name, island.name, order.settings.service_account),
        _policy(order, name, island.name, own),
        jobset(order, island, now_unix),
    ]


def jobset(order: Order, island: PlacedIsland, now_unix: int) -> Manifest:
    """Return the island's JobSet: as many pods as the slice has hosts, all or none.

    now_unix: first incarnation of this JobSet, above those of any JobSet before it.
    """
    rules = [
        HOPELESS,
        {"action": "FailJob", "onPodConditions": DISRUPTED},
        {"action": "FailJob", "onExitCodes": LASTED},
    ]
    job = {
        "parallelism": island.slice.hosts,
        "completions": island.slice.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {
            "metadata": {"labels": _labels(order, island.name)},
            "spec": island_pod(order, island, now_unix),
        },
    }
    metadata = _metadata(order, island.resource, island.name)
    if falls_back(island):
        # All pods in one of the island's pools.
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": POOL,
        }
    if order.settings.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = order.settings.queue
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": order.fruitless_starts - 1,
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
                        # Those that were preempted, or made lasting progress.
                        "name": "uncounted",
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


def coordinator(order: Order, node: PlacedNode, now_unix: int) -> list[Manifest]:
    """Return account, service, policy, disruption budget and Job of the coordinator.

    now_unix: the last hour counts from then.
    """
    name, part = node.resource, node.stem
    return [
        _account(order, name, part, _coordinators_account(order)),
        _service(order, node),
        _policy(order, name, part, [_islands_may(order, order.ports)]),
        _budget(order, name, part),
        _job(order, name, part, coordinator_pod(order, node, now_unix)),
    ]


def worker(order: Order, number: int, now_unix: int) -> list[Manifest]:
    """Return account, service, policy and Job of a worker on a machine of its own."""
    name, part = order.workers[number], part_of_worker(number)
    control, bulk = PORT, PORT + 1
    leads: list[Manifest] = [
        {"podSelector": {"matchLabels": _labels(order, node.stem)}}
        for node in order.nodes
    ]
    may_lead = {"from": leads, "ports": [{"protocol": "TCP", "port": control}]}
    metadata = _metadata(order, name, part)
    return [
        _account(order, name, part, _coordinators_account(order)),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "selector": _labels(order, part),
                "ports": [
                    {"name": "lead", "port": control},
                    {"name": "bulk", "port": bulk},
                ],
            },
        },
        _policy(order, name, part, [may_lead, _islands_may(order, (bulk,))]),
        _budget(order, name, part),
        _job(order, name, part, worker_pod(order, number, now_unix)),
    ]


def part_of_worker(number: int) -> str:
    """Return the part of the run that a worker is, in labels."""
    return f"worker-{number}"


def permit(order: Order) -> Manifest:
    """Return the Job that lets the run begin on its disk. It is done once; the object
    stays, so that it is not done again on a disk that replaces a lost one."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(order, order.permit, PERMIT),
        "spec": {
            "backoffLimit": order.fruitless_starts - 1,
            "template": {
                "metadata": {"labels": _labels(order, PERMIT)},
                "spec": permit_pod(order),
            },
        },
    }


def reader(order: Order, node: PlacedNode) -> Manifest:
    """Return the pod from which results are copied off a node's disk."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(order, reader_name(order, node), "reader"),
        "spec": reader_pod(order, node),
    }


def reader_name(order: Order, node: PlacedNode) -> str:
    """Return the name of that pod."""
    return f"{order.name}-reader"


def disk(order: Order, name: str, part: str) -> Manifest:
    """Return the disk on which a coordinator, or a worker, keeps its part of the run.
    It is an object of its own, which outlives the Job."""
    size = f"{order.settings.coordinator_disk_gb}Gi"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(order, name, part),
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


def _job(order: Order, name: str, part: str, pod: Manifest) -> Manifest:
    """Return the Job of a coordinator, or of a worker, which has a disk."""
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(order, name, part),
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": order.fruitless_starts - 1,
            # Two on one disk: the second waits until the first has ended.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    HOPELESS,
                    {"action": "Ignore", "onPodConditions": DISRUPTED},
                    {"action": "Ignore", "onExitCodes": LASTED},
                ]
            },
            "template": {
                "metadata": {
                    "labels": _labels(order, part),
                    "annotations": annotations,
                },
                "spec": pod,
            },
        },
    }


def _budget(order: Order, name: str, part: str) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(order, name, part),
        "spec": {
            "minAvailable": 1,
            "selector": {"matchLabels": _labels(order, part)},
        },
    }


def _coordinators_account(order: Order) -> str:
    return order.settings.coordinator_account or order.settings.service_account


def _service(order: Order, node: PlacedNode) -> Manifest:
    """Return the service of a coordinator: in its cluster, or behind an internal load
    balancer if it is to be reached from elsewhere."""
    address = node.outside
    workers = range(len(order.ports) - 2)
    names = ("control", "bulk", *(f"worker-{worker}" for worker in workers))
    metadata = _metadata(order, node.resource, node.stem)
    spec: Manifest = {
        "selector": _labels(order, node.stem),
        "ports": [
            {"name": name, "port": port}
            for name, port in zip(names, order.ports, strict=True)
        ],
    }
    if address:
        metadata["annotations"] = {
            "networking.gke.io/load-balancer-type": "Internal",
            # From other regions, too.
            "networking.gke.io/internal-load-balancer-allow-global-access": "true",
        }
        spec["type"] = "LoadBalancer"
        if _is_number(address):
            spec["loadBalancerIP"] = address
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _islands_may(order: Order, to: tuple[int, ...]) -> Manifest:
    """Return the rule that lets the run's islands, wherever they are, come to these
    ports."""
    peers: list[Manifest] = [
        {"podSelector": {"matchLabels": {"diloco-run": order.name}}}
    ]
    if any(node.outside for node in order.nodes):
        peers += [{"ipBlock": {"cidr": block}} for block in PRIVATE]
    ports = [{"protocol": "TCP", "port": port} for port in to]
    return {"from": peers, "ports": ports}


def _policy(
    order: Order, name: str, part: str, ingress: list[dict[str, Any]]
) -> Manifest:
    """Return the policy that lets nobody else into the part's pods."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(order, name, part),
        "spec": {
            "podSelector": {"matchLabels": _labels(order, part)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _account(order: Order, name: str, part: str, cloud_account: str) -> Manifest:
    """Return the account of the part's pods. Workload Identity makes it the cloud's
    account, if there is one."""
    metadata = _metadata(order, name, part)
    if cloud_account:
        metadata["annotations"] = {"iam.gke.io/gcp-service-account": cloud_account}
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}


def _metadata(order: Order, name: str, part: str) -> Manifest:
    return {
        "name": name,
        "namespace": order.settings.namespace,
        "labels": _labels(order, part),
    }


def _labels(order: Order, part: str) -> dict[str, str]:
    return {"app": "diloco", "diloco-run": order.name, "diloco-part": part}
