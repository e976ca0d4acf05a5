"""A checked launch order: the names, places and command lines that both backends share.

Nothing is asked of the cloud here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args

from diloco_jax import run_files
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    LaunchConfig,
    Placement,
    own_code,
)
from diloco_jax.launch.fleet import Slice, find_slice
from diloco_jax.launch.variables import check_variables
from diloco_jax.paths import is_bucket
from diloco_jax.weights.sources import FROM_ISLAND, source_of
from diloco_jax.wire import principal

Backend = Literal["tpu_vm", "gke"]
Purchase = Literal["on_demand", "spot", "reserved"]
PURCHASES: dict[str, Purchase] = {p: p for p in get_args(Purchase)}

PLATFORMS = "tpu,cpu"
"""JAX_PLATFORMS of every island's process."""
PORT = 7077
"""Port of the coordinator's control."""

# Folders on every machine and in every container.
ROOT = "/var/lib/diloco"
CONFIG_FOLDER = f"{ROOT}/config"
CERTIFICATES = f"{ROOT}/certificates"
DATA = f"{ROOT}/data"
WORKDIR = f"{ROOT}/run"

COORDINATOR = "coordinator"
INIT_WITHIN_S = 3600
"""Seconds after the making of its machine in which a coordinator may begin a new run on
an empty disk. Later, an empty disk means that the run's disk got lost."""

ZONE = re.compile(r"(?<=\d)-[a-z]$")
"""Ending of a zone's name after its region's name."""
MAX_NAME = 40
"""Longest name in letters. GKE's node pools have the strictest limit of all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedIsland:
    """One island, its slice, and the way in which the slice is bought."""

    name: str
    """Name of the island in the config."""
    resource: str
    """Name of everything that is made for the island."""
    slice: Slice
    zone: str
    purchase: Purchase
    reservation: str
    """Name of the reservation; empty = any of the project's."""

    def arguments(self, address: str, notice_s: float) -> tuple[str, ...]:
        """Return the arguments of `diloco` on the island's hosts, less the incarnation.

        notice_s: seconds from SIGTERM until the goodbye must be said.
        """
        return (
            *("island", f"{CONFIG_FOLDER}/{run_files.CONFIG}", "--name", self.name),
            *("--coordinator", address, "--workdir", WORKDIR),
            *("--certificates", CERTIFICATES, "--notice-s", f"{notice_s:g}"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A launch whose settings have been checked."""

    name: str
    settings: LaunchConfig
    islands: tuple[PlacedIsland, ...]
    config_json: str
    """The config as the machines read it."""
    source: str = ""
    """Where the first parameters come from; empty = they are drawn."""
    ports: tuple[int, ...] = (PORT, PORT + 1)
    """Ports of the coordinator, see `Placement.ports`."""

    @property
    def secrets(self) -> dict[str, str]:
        """Names of the secrets with certificates, by the stem of the files in them."""
        islands = {principal.island(i.name).stem: i.resource for i in self.islands}
        owners = {COORDINATOR: self.coordinator, **islands}
        return {stem: f"{resource}-certificates" for stem, resource in owners.items()}

    def owner_of(self, stem: str) -> str:
        """Return the part of the run that has the certificates of this stem."""
        names = {principal.island(i.name).stem: i.name for i in self.islands}
        return names.get(stem, COORDINATOR)

    @property
    def coordinator(self) -> str:
        """Name of everything that is made for the coordinator."""
        return f"{self.name}-{COORDINATOR}"

    def coordinator_arguments(self, address: str) -> tuple[str, ...]:
        """Return the coordinator's arguments of `diloco`, less `--init`."""
        return (
            *(COORDINATOR, f"{CONFIG_FOLDER}/{run_files.CONFIG}", "--workdir", WORKDIR),
            *("--bind", f"0.0.0.0:{PORT}", "--advertise", address),
            *("--certificates", CERTIFICATES),
        )

    def init_arguments(self) -> tuple[str, ...]:
        """Return the further ones of a coordinator that begins a run."""
        return ("--init", self.source) if self.source else ("--init",)


def make_order(config: Config, path: str, on: Backend, source: str = "") -> Order:
    """Return the launch of the config read from `path`.

    source: hf:gs://BUCKET/FOLDER or run:gs://BUCKET/FOLDER, which the coordinator's
    machine reads; empty = the parameters are drawn.

    Raises ConfigError naming field, value and remedy.
    """
    settings = config.launch
    needed = ("project", "image", "coordinator_zone", *_needed(on))
    if empty := [field for field in needed if not getattr(settings, field)]:
        options = ", ".join(f"--launch.{field.replace('_', '-')}" for field in empty)
        raise ConfigError(
            f"{', '.join(f'launch.{field}' for field in empty)} must be set for "
            f"`diloco launch --on {on}`: in the config, or as {options}"
        )
    if not re.fullmatch(r"[a-z][-a-z0-9]{4,28}[a-z0-9]", settings.project):
        raise ConfigError(
            f"launch.project = {settings.project!r} is no project id; `gcloud projects "
            f"list` shows yours"
        )
    if settings.data and not re.match(r"gs://[^/]+/[^/]", settings.data):
        raise ConfigError(
            f"launch.data = {settings.data!r} is no gs://BUCKET/FOLDER; copy the text "
            f"to a bucket (`gcloud storage rsync -r FOLDER gs://BUCKET/FOLDER`)"
        )
    if config.run.data.paths and not settings.data:
        raise ConfigError(
            f"data.paths = {', '.join(config.run.data.paths)} is on this machine only; "
            f"copy it to a bucket (`gcloud storage rsync -r`) and name that as "
            f"launch.data = 'gs://BUCKET/FOLDER'"
        )
    if config.run.data.tokenizer and not settings.data:
        raise ConfigError(
            f"data.tokenizer = {config.run.data.tokenizer!r} is on this machine only; "
            f"copy it to a bucket beside the data, and name that as launch.data = "
            f"'gs://BUCKET/FOLDER'"
        )
    for section in ("model", "data", "sync", "outer"):
        for name, value in own_code(getattr(config.run, section)).items():
            if Path(value.rpartition(":")[0]).exists():
                raise ConfigError(
                    f"{section}.{name} = {value!r} is a file of this machine, and "
                    f"islands run what is in launch.image; install it there as a "
                    f"package and name it as 'package.module:name' (docs/tpu.md, The "
                    f"image)"
                )
    _check_source(source)
    check_variables(config)
    for field in ("zones", "purchase"):
        for name in getattr(settings, field):
            if name not in config.islands:
                raise ConfigError(
                    f"launch.{field} names {name!r}, but the islands are "
                    f"{', '.join(config.islands)}"
                )
    name = settings.name or Path(path).stem
    if Path(path).name == run_files.CONFIG and not settings.name:
        raise ConfigError(
            "launch.name is empty, and config.json names no run; set launch.name"
        )
    islands = tuple(_place(name, config, island, on) for island in config.islands)
    if on == "gke":
        _check_zones(settings, islands)
    resources = [island.resource for island in islands]
    for resource in (*resources, _resource(name, COORDINATOR)):
        if [*resources, _resource(name, COORDINATOR)].count(resource) > 1:
            raise ConfigError(
                f"two parts of the run would be called {resource!r}; rename an island"
            )
    return Order(
        name=_resource(name, ""),
        settings=settings,
        islands=islands,
        config_json=json.dumps(_host_config(config, islands), indent=2),
        source=source,
        ports=tuple(range(PORT, PORT + config.placement.ports)),
    )


def _check_source(source: str) -> None:
    """Raise ConfigError unless the coordinator's machine can find the source."""
    if not source or source.startswith(FROM_ISLAND):
        return
    kind, folder = source_of(source)
    if not is_bucket(folder):
        raise ConfigError(
            f"--init {source}: {folder} is a folder of this machine, and the "
            f"coordinator's machine reads the weights; copy it to a bucket (`gcloud "
            f"storage rsync -r {folder} gs://BUCKET/FOLDER`) and give --init "
            f"{kind}:gs://BUCKET/FOLDER"
        )


def _needed(on: Backend) -> tuple[str, ...]:
    return ("cluster", "location") if on == "gke" else ()


def _place(name: str, config: Config, island: str, on: Backend) -> PlacedIsland:
    settings = config.launch
    if island not in settings.zones:
        raise ConfigError(
            f"launch.zones has no zone for island {island!r}; add one, for example "
            f"zones={{{island!r}: 'us-east5-a'}}"
        )
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
    return PlacedIsland(
        name=island,
        resource=_resource(name, island),
        slice=found,
        zone=settings.zones[island],
        purchase=purchase,
        reservation=reservation,
    )


def _check_zones(settings: LaunchConfig, islands: tuple[PlacedIsland, ...]) -> None:
    """Raise ConfigError for a zone in which the cluster cannot have nodes. A zonal
    cluster may have nodes in all zones of its region, like a regional one."""
    region = ZONE.sub("", settings.location)
    fields = {"launch.coordinator_zone": (settings.coordinator_zone, "")}
    for island in islands:
        generation = island.slice.generation
        known = [zone for zone in generation.zones if ZONE.sub("", zone) == region]
        offers = f" ({generation.name} is known in {', '.join(known)})" if known else ""
        fields[f"launch.zones.{island.name}"] = (island.zone, offers)
    for field, (zone, offers) in fields.items():
        if ZONE.sub("", zone) != region:
            raise ConfigError(
                f"{field} = {zone!r} is outside launch.location = "
                f"{settings.location!r}, and all nodes of a GKE cluster are in its "
                f"region; choose a zone of {region}{offers}, or set launch.cluster and "
                f"launch.location to a cluster there"
            )
        if zone == region:
            raise ConfigError(
                f"{field} = {zone!r} is a region, and node pools are in one zone of it;"
                f" write a zone such as '{zone}-a'{offers}"
            )


def slice_of(name: str, island: IslandConfig) -> Slice:
    """Return the TPU slice of the island, which its mesh fills.

    Raises ConfigError naming field, value and remedy.
    """
    field = f"islands.{name}.topology"
    if not island.topology:
        raise ConfigError(
            f"{field} is empty: name the slice that the island runs on, such as "
            f"'v5p:2x2x1' or 'v6e:4x4'"
        )
    found = find_slice(island.topology, field)
    if island.devices != found.chips:
        raise ConfigError(
            f"islands.{name}: its mesh has {island.devices} devices, and "
            f"{found.topology} has {found.chips} chips, one device each; choose mesh_* "
            f"whose product is {found.chips}, or another topology"
        )
    if island.hosts not in (1, found.hosts):
        raise ConfigError(
            f"islands.{name}.hosts = {island.hosts}, and {found.topology} has "
            f"{found.hosts}; leave it out, the topology says it"
        )
    return found


def _resource(name: str, part: str) -> str:
    """Return a name that every part of the cloud accepts."""
    made = re.sub(r"[._]", "-", f"{name}-{part}" if part else name).lower()
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made) or len(made) > MAX_NAME:
        raise ConfigError(
            f"{made!r} cannot name machines: letters, digits and '-' are allowed, a "
            f"letter first, {MAX_NAME} in all; set a shorter launch.name, or rename "
            f"the island"
        )
    return made


def _copied(config: Config) -> DataConfig:
    """Return the data's config with the paths that the machines have.

    Each machine has a copy of `launch.data`. That copy is all of the data or, for a
    mixture, has its folders by name. The tokenizer is in it, too.
    """
    data, paths = config.run.data, tuple[str, ...]()
    if config.launch.data:
        names = [Path(path).name for path in data.paths]
        mixed = len(data.weights) > 1
        paths = tuple(f"{DATA}/{name}" for name in names) if mixed else (DATA,)
    tokenizer = f"{DATA}/{Path(data.tokenizer).name}" if data.tokenizer else ""
    return dataclasses.replace(data, paths=paths, tokenizer=tokenizer)


def _host_config(config: Config, placed: tuple[PlacedIsland, ...]) -> dict[str, Any]:
    """Return the config for the machines, with the number of hosts of each slice.

    It leaves out the settings of this machine; the machines' command lines give their
    own.
    """
    here = Placement()
    placement = dataclasses.replace(
        config.placement,
        workdir=here.workdir,
        bind=here.bind,
        advertise=here.advertise,
        certificates=here.certificates,
        insecure=here.insecure,
    )
    run = dataclasses.replace(config.run, data=_copied(config))
    islands = {
        island.name: dataclasses.replace(
            config.islands[island.name], hosts=island.slice.hosts
        )
        for island in placed
    }
    told = Config(run=run, islands=islands, placement=placement, launch=config.launch)
    return dataclasses.asdict(told.validate())
