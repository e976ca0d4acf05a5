"""Command lines of `kubectl` for a launch's objects, each for one cluster."""

from __future__ import annotations

from diloco_jax.launch.order import Order
from diloco_jax.launch.placing import GkeCluster
from diloco_jax.launch.resources import Command


def kubectl(
    order: Order, cluster: GkeCluster, *arguments: str, deadline_s: float = 120.0
) -> Command:
    """Return a command in the cluster, and in the launch's namespace."""
    where = (f"--context={cluster.context}", f"--namespace={order.settings.namespace}")
    # After "--" comes a command in the pod.
    own = arguments.index("--") if "--" in arguments else len(arguments)
    return Command(("kubectl", *arguments[:own], *where, *arguments[own:]), deadline_s)


def find(order: Order, cluster: GkeCluster, kind: str, name: str) -> Command:
    """Return the command that prints the object's name, and nothing if there is
    none."""
    get = ("get", kind, name, "--ignore-not-found", "-o", "name")
    return kubectl(order, cluster, *get)


def apply(order: Order, cluster: GkeCluster, file: str) -> Command:
    """Return the command that makes the objects of a file."""
    return kubectl(order, cluster, "apply", "-f", file)


def delete(order: Order, cluster: GkeCluster, kinds: str, name: str) -> Command:
    """Return the command that deletes the objects of that name, and waits for it."""
    words = ("delete", kinds, name, "--ignore-not-found")
    return kubectl(order, cluster, *words, deadline_s=300)
