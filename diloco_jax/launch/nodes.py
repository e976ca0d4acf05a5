"""The coordinators of a launch in their places: the first one, and its standby.

Either may lead. Each is a node: it has a machine, a disk and a key of its own.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.config import Config, ConfigError, LaunchConfig
from diloco_jax.config.validation import require_followable
from diloco_jax.coordinator.mandates.bucket import BUCKET
from diloco_jax.coordinator.mandates.kubernetes import KUBERNETES
from diloco_jax.launch.placing import (
    Backend,
    GkeCluster,
    PlacedIsland,
    cluster_of,
    read_cluster,
    resource_name,
)
from diloco_jax.weights.init_option import FROM_ISLAND
from diloco_jax.wire.principal import COORDINATOR, STANDBY


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedNode:
    """One coordinator in its place."""

    stem: str
    """Stem of its certificates' files; also its part of the run, in labels."""
    resource: str
    """Name of everything that is made for it."""
    zone: str
    cluster: GkeCluster
    """Only for GKE."""
    namespace: str
    outside: str
    """Host at which it is reached from other clusters; empty = it is not."""

    @property
    def follows(self) -> bool:
        """True for the standby, which leads only once the other one is gone."""
        return self.stem == STANDBY.stem

    @property
    def files(self) -> str:
        """Beginning of the names of its files in the launch's folder. No dot is in
        other parts' names."""
        return f"{self.stem}." if self.follows else ""

    @property
    def inside(self) -> str:
        """Host at which it is reached in its cluster."""
        return f"{self.resource}.{self.namespace}.svc"

    @property
    def host(self) -> str:
        """Host at which everyone reaches it."""
        return self.outside or self.inside

    def host_for(self, cluster: GkeCluster) -> str:
        """Return the host at which pods of that cluster dial it."""
        return self.inside if cluster == self.cluster else self.host


def place_nodes(
    config: Config, name: str, on: Backend, source: str
) -> tuple[PlacedNode, ...]:
    """Return the coordinator of the run of that name, then its standby if the launch
    makes one. source: see `Order.source`.

    Raises ConfigError naming field, value and remedy.
    """
    settings = config.launch
    first = PlacedNode(
        stem=COORDINATOR.stem,
        resource=resource_name(name, COORDINATOR.stem),
        zone=settings.coordinator_zone,
        cluster=cluster_of(settings),
        namespace=settings.namespace,
        outside=settings.coordinator_address,
    )
    if not settings.standby_zone:
        _require_no_standby(settings)
        return (first,)
    second = PlacedNode(
        stem=STANDBY.stem,
        resource=resource_name(name, STANDBY.stem),
        zone=settings.standby_zone,
        cluster=read_cluster(
            settings, "launch.standby_cluster", settings.standby_cluster
        ),
        namespace=settings.namespace,
        outside=settings.standby_address,
    )
    _check_standby(config, on, source)
    if settings.workers_apart and first.cluster != second.cluster:
        raise ConfigError(
            f"launch.standby_cluster = {settings.standby_cluster!r} and "
            f"launch.workers_apart = True: the workers' pods are not reached from "
            f"another cluster; leave one of them out"
        )
    return first, second


def mandate_of(config: Config, nodes: tuple[PlacedNode, ...], name: str) -> str:
    """Return `placement.mandate` of the machines: without a given one, a Lease in the
    cluster of both nodes. name: of the run's resources.

    Raises ConfigError for an object that one of the nodes does not reach.
    """
    given = config.placement.mandate
    if len(nodes) == 1:
        return given
    if given.startswith(BUCKET):
        return given
    if given:
        raise ConfigError(
            f"placement.mandate = {given!r} and launch.standby_zone = "
            f"{nodes[1].zone!r}: pods share no folder, and a launch makes a Lease of "
            f"its own; leave placement.mandate out, or give gs://BUCKET/OBJECT"
        )
    if nodes[0].cluster != nodes[1].cluster:
        raise ConfigError(
            f"launch.standby_cluster = {config.launch.standby_cluster!r} without "
            f"placement.mandate: a Lease is in one cluster, and goes with it; give "
            f"placement.mandate = 'gs://BUCKET/OBJECT', which says who leads"
        )
    return f"{KUBERNETES}{nodes[0].namespace}/{lease_name(name)}"


def lease_name(name: str) -> str:
    """Return the name of the Lease of a run, and of the role of those who write it."""
    return f"{name}-mandate"


def check_reached(
    nodes: tuple[PlacedNode, ...], islands: tuple[PlacedIsland, ...]
) -> None:
    """Raise ConfigError for a node that has to be reached from another cluster, and has
    no address there."""
    for node in nodes:
        others = {other.stem: other.cluster for other in nodes}
        callers = {island.name: island.cluster for island in islands} | others
        away = [name for name, where in callers.items() if where != node.cluster]
        if away and not node.outside:
            raise ConfigError(
                f"launch.{node.stem}_address is empty, and {', '.join(away)} run in "
                f"other clusters than the {node.stem}; reserve an internal address in "
                f"its subnet (`gcloud compute addresses create`) and write it there, "
                f"or a host name that leads to it"
            )


def _require_no_standby(settings: LaunchConfig) -> None:
    for field in ("standby_cluster", "standby_address"):
        if value := getattr(settings, field):
            raise ConfigError(
                f"launch.{field} = {value!r} and launch.standby_zone is empty: there "
                f"is no standby; set its zone, or leave launch.{field} out"
            )


def _check_standby(config: Config, on: Backend, source: str) -> None:
    """Raise ConfigError where there can be no standby."""
    placement, zone = config.placement, config.launch.standby_zone
    asked = f"launch.standby_zone = {zone!r}"
    if on != "gke":
        raise ConfigError(
            f"{asked} with --on {on}: only --on gke makes a machine for a standby and "
            f"an object that says who leads; leave it out, or launch with --on gke"
        )
    require_followable(placement, asked)
    if source.startswith(FROM_ISLAND):
        raise ConfigError(
            f"--init {source} and {asked}: a standby goes on from files, and there are "
            f"none before that island comes; leave one of them out"
        )
    if placement.standby:
        raise ConfigError(
            f"placement.standby = {placement.standby!r} and {asked}: a launch gives "
            f"islands the address of its own standby; leave placement.standby out"
        )
