"""Places of a launch's islands: slices, zones, clusters and the way they are bought."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, get_args

from diloco_jax.config import Config, ConfigError, LaunchConfig
from diloco_jax.hardware.slices import Slice, slice_of

Backend = Literal["tpu_vm", "gke", "sky"]
Purchase = Literal["on_demand", "spot", "reserved"]
PURCHASES: dict[str, Purchase] = {p: p for p in get_args(Purchase)}

ZONE = re.compile(r"(?<=\d)-[a-z]$")
"""Ending of a zone's name after its region's name."""
MAX_NAME = 40
"""Longest name in letters. GKE's node pools have the strictest limit of all."""
MAX_ZONES = 9


@dataclasses.dataclass(frozen=True)
class GkeCluster:
    """One GKE cluster."""

    project: str
    location: str
    name: str

    @property
    def context(self) -> str:
        """Name under which `gcloud container clusters get-credentials` keeps it."""
        return f"gke_{self.project}_{self.location}_{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedIsland:
    """One island, its slice, and the way in which the slice is bought."""

    name: str
    """Name of the island in the config."""
    resource: str
    """Name of everything that is made for the island."""
    slice: Slice
    zones: tuple[str, ...]
    """The first is tried first."""
    purchase: Purchase
    reservation: str
    """Name of the reservation; empty = any of the project's."""
    cluster: GkeCluster
    """Only for GKE."""
    offer_ports: tuple[int, ...] = ()
    """Ports at which it offers its anchors to islands that join."""

    @property
    def zone(self) -> str:
        """Zone that is tried first."""
        return self.zones[0]

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of its node pools, one in each zone."""
        others = range(1, len(self.zones))
        return (self.resource, *(f"{self.resource}-{number}" for number in others))


def place(run: str, config: Config, island: str, on: Backend) -> PlacedIsland:
    """Return an island of the run of that name in its place.

    Raises ConfigError naming field, value and remedy.
    """
    settings = config.launch
    found = slice_of(island, config.islands[island])
    how, _, reservation = settings.purchase.get(island, "on_demand").partition(":")
    purchase = PURCHASES.get(how)
    field = f"launch.purchase.{island}"
    if purchase is None or (reservation and purchase != "reserved"):
        raise ConfigError(
            f"{field} = {settings.purchase[island]!r}; write 'on_demand', 'spot', "
            f"'reserved' or 'reserved:NAME'"
        )
    if on == "tpu_vm" and reservation:
        raise ConfigError(
            f"{field} = {settings.purchase[island]!r}: queued resources take any "
            f"reservation that fits; write 'reserved'"
        )
    if on == "gke" and purchase == "reserved" and not reservation:
        raise ConfigError(
            f"{field} = 'reserved': GKE needs the reservation; write 'reserved:NAME'"
        )
    if on == "sky" and purchase == "reserved":
        raise ConfigError(
            f"{field} = {settings.purchase[island]!r}: SkyPilot buys no reserved TPUs; "
            f"launch this run with --on gke or --on tpu_vm"
        )
    if on == "sky" and not found.accelerator_type:
        raise ConfigError(
            f"islands.{island}.topology = {found.topology!r}: SkyPilot asks for slices "
            f"by accelerator type, and this shape has none; choose "
            f"{found.generation.name} with one of {', '.join(found.generation.shapes)},"
            f" or launch with --on gke or --on tpu_vm"
        )
    zones = tuple(re.split(r"[,\s]+", settings.zones[island].strip()))
    if on == "tpu_vm" and len(zones) > 1:
        raise ConfigError(
            f"launch.zones.{island} = {settings.zones[island]!r}: a queued resource "
            f"waits in one zone; write one, or launch with --on sky or --on gke, which "
            f"try one zone after the other"
        )
    if len(zones) > min(MAX_ZONES, len(set(zones))) or "" in zones:
        raise ConfigError(
            f"launch.zones.{island} = {settings.zones[island]!r}; write up to "
            f"{MAX_ZONES} different zones: 'us-east5-a,us-east5-b'"
        )
    if len(zones) > 1:
        resource_name(run, f"{island}-{len(zones) - 1}")
    return PlacedIsland(
        name=island,
        resource=resource_name(run, island),
        slice=found,
        zones=zones,
        purchase=purchase,
        reservation=reservation,
        cluster=cluster_of(settings, island),
        offer_ports=config.islands[island].offer_ports,
    )


def cluster_of(settings: LaunchConfig, island: str = "") -> GkeCluster:
    """Return the cluster of an island, or of the coordinator.

    Raises ConfigError naming field, value and remedy.
    """
    written = settings.clusters.get(island, "")
    return read_cluster(settings, f"launch.clusters.{island}", written)


def read_cluster(settings: LaunchConfig, field: str, written: str) -> GkeCluster:
    """Return the cluster that a field names; if it is empty, the coordinator's.

    Raises ConfigError naming field, value and remedy.
    """
    parts = written.split("/") if written else [settings.location, settings.cluster]
    if len(parts) == 2:
        parts.insert(0, settings.project)
    if len(parts) != 3 or (written and not all(parts)):
        raise ConfigError(
            f"{field} = {written!r}; write 'LOCATION/CLUSTER' or "
            f"'PROJECT/LOCATION/CLUSTER', such as 'us-central1/tpus'"
        )
    return GkeCluster(*parts)


def check_clusters(settings: LaunchConfig, islands: tuple[PlacedIsland, ...]) -> None:
    """Raise ConfigError for a cluster of an island that the run does not have."""
    for name in settings.clusters:
        if name not in [island.name for island in islands]:
            raise ConfigError(
                f"launch.clusters names {name!r}, but the islands are "
                f"{', '.join(island.name for island in islands)}"
            )


def check_zones(settings: LaunchConfig, islands: tuple[PlacedIsland, ...]) -> None:
    """Raise ConfigError for a zone in which its cluster cannot have nodes. A zonal
    cluster may have nodes in all zones of its region, like a regional one."""
    home = cluster_of(settings)
    fields = [("launch.coordinator_zone", settings.coordinator_zone, home, "", "")]
    for island in islands:
        generation, region = island.slice.generation, region_of(island.cluster.location)
        known = [zone for zone in generation.zones if region_of(zone) == region]
        offers = f" ({generation.name} is known in {', '.join(known)})" if known else ""
        for zone in island.zones:
            field = f"launch.zones.{island.name}"
            fields.append((field, zone, island.cluster, offers, island.name))
    for field, zone, cluster, offers, name in fields:
        region = region_of(cluster.location)
        if region_of(zone) != region:
            where = f"launch.location = {cluster.location!r}"
            other = "set launch.cluster and launch.location to a cluster there"
            if name:
                other = f"name a cluster there: launch.clusters.{name}"
            if name in settings.clusters:
                where = f"launch.clusters.{name} = {settings.clusters[name]!r}"
            raise ConfigError(
                f"{field} = {zone!r} is outside {where}, and all nodes of a GKE "
                f"cluster are in its region; choose a zone of {region}{offers}, or "
                f"{other}"
            )
        if zone == region:
            raise ConfigError(
                f"{field} = {zone!r} is a region, and node pools are in one zone of it;"
                f" write a zone such as '{zone}-a'{offers}"
            )


def region_of(zone: str) -> str:
    """Return the region of a zone; a region is its own."""
    return ZONE.sub("", zone)


def resource_name(name: str, part: str) -> str:
    """Return a name that every part of the cloud accepts.

    Raises ConfigError for one that cannot be made into such a name.
    """
    made = re.sub(r"[._]", "-", f"{name}-{part}" if part else name).lower()
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made) or len(made) > MAX_NAME:
        raise ConfigError(
            f"{made!r} cannot name machines: letters, digits and '-' are allowed, a "
            f"letter first, {MAX_NAME} in all; set a shorter launch.name, or rename "
            f"the island"
        )
    return made
