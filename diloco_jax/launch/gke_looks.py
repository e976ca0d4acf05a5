"""Commands that look at a run on GKE: status, last lines, and a copy of its folder."""

from __future__ import annotations

from pathlib import Path

from diloco_jax.launch import manifests
from diloco_jax.launch.kubectl import apply, delete, kubectl
from diloco_jax.launch.nodes import PlacedNode
from diloco_jax.launch.order import (
    CERTIFICATES,
    COORDINATOR,
    LOG_LINES,
    PORT,
    WORKDIR,
    Order,
)
from diloco_jax.launch.resources import Command, Owned

RESULTS = "results"
"""Folder of the coordinator's workdir."""


def statuses(order: Order) -> tuple[Command, ...]:
    """Return the commands that ask each node, in its own pod; one of them leads."""
    asked = []
    for node in order.nodes:
        inside = ("exec", f"job/{node.resource}", "--container=diloco", "--")
        ask = ("diloco", "status", f"{node.host}:{PORT}", "--json")
        line = (*inside, *ask, "--certificates", CERTIFICATES)
        asked.append(kubectl(order, node.cluster, *line))
    return tuple(asked)


def logs(order: Order) -> tuple[Owned, ...]:
    """Return the commands that print the last lines of every process."""
    lines = f"--tail={LOG_LINES}"
    served = [(node.resource, node.cluster) for node in order.nodes]
    served += [(worker, order.cluster) for worker in order.workers]
    own = ("--container=diloco", lines)
    return (
        *(
            Owned(COORDINATOR, kubectl(order, cluster, "logs", f"job/{name}", *own))
            for name, cluster in served
        ),
        *(
            Owned(
                island.name,
                kubectl(
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


def results(order: Order, folder: str) -> tuple[Command, ...]:
    """Return the commands that copy each node's workdir, from a pod beside its disk."""
    return tuple(
        command for node in order.nodes for command in _copied(order, node, folder)
    )


def _copied(order: Order, node: PlacedNode, folder: str) -> tuple[Command, ...]:
    name, cluster = manifests.reader_name(order, node), node.cluster
    ready = ("--for=condition=Ready", "--timeout=900s")
    to = RESULTS
    copy = ("cp", f"{name}:{WORKDIR}", str(Path(folder).parent / to))
    return (
        apply(order, cluster, f"{folder}/reader.yaml"),
        kubectl(order, cluster, "wait", f"pod/{name}", *ready, deadline_s=1000),
        kubectl(order, cluster, *copy, "--container=diloco", deadline_s=24 * 3600),
        delete(order, cluster, "pod", name),
    )
