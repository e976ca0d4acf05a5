"""The coordinator of a launch in its place."""

from __future__ import annotations

import dataclasses

from diloco_jax.config import Config, ConfigError
from diloco_jax.launch.placing import (
    GkeCluster,
    PlacedIsland,
    cluster_of,
    resource_name,
)
from diloco_jax.wire.principal import COORDINATOR


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedNode:
    """The coordinator in its place."""

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


def place_nodes(config: Config, name: str) -> tuple[PlacedNode, ...]:
    """Return the coordinator of the run of that name."""
    settings = config.launch
    first = PlacedNode(
        stem=COORDINATOR.stem,
        resource=resource_name(name, COORDINATOR.stem),
        zone=settings.coordinator_zone,
        cluster=cluster_of(settings),
        namespace=settings.namespace,
        outside=settings.coordinator_address,
    )
    return (first,)


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
