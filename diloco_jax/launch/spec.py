"""A checked launch: the names, places and command lines that all backends share.

Nothing is asked of the cloud here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Literal, get_args

from diloco_jax import run_files
from diloco_jax.before_jax import MULTI_SLICE
from diloco_jax.compilation import of_launch
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    LaunchConfig,
    Placement,
    own_code,
    suggest,
)
from diloco_jax.config.config import require_worth
from diloco_jax.config.placement import region_of, variables_of, zones_of
from diloco_jax.config.run import FROM_ISLAND, read_init
from diloco_jax.files import is_bucket
from diloco_jax.hardware.tpus import Slice, slice_of
from diloco_jax.wire import peers

Backend = Literal["tpu_vm", "gke", "sky"]
Purchase = Literal["on_demand", "spot", "reserved"]
PURCHASES: dict[str, Purchase] = {p: p for p in get_args(Purchase)}

PLATFORMS = "tpu,cpu"
"""JAX_PLATFORMS of every island's process."""
PORT = 7077
"""Port of the coordinator's control."""
PORTS = PORT, PORT + 1
"""Ports of the coordinator: control and bulk."""

# Folders on every machine and in every container.
ROOT = "/var/lib/diloco"
CONFIG_FOLDER = f"{ROOT}/config"
CERTIFICATES = f"{ROOT}/certificates"
DATA = f"{ROOT}/data"
WORKDIR = f"{ROOT}/run"

COORDINATOR = "coordinator"
PERMIT = "begin"
"""File on the coordinator's disk: the run may begin there. It comes there once."""

FRUITLESS_STARTS = 20
"""`placement.fruitless_starts` of a launch whose config has none. Machines count by it
too: whoever fails before its hello is not heard by the coordinator."""
KEPT_HOURS = 24.0 * 365
"""Hours for which a coordinator lingers whose machine is not to be given back."""

MAX_NAME = 40
"""Longest name in letters. GKE's node pools have the strictest limit of all."""
MAX_ZONES = 9

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"[A-Za-z0-9][-_.A-Za-z0-9]*")
CREDENTIAL = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|_KEY)$", re.I)
OF_THE_LAUNCH = frozenset(
    (
        *("JAX_PLATFORMS", "RESTART_ATTEMPT", "PATH", "DOCKER_CONFIG"),
        *("ROLE", "ROOT", "PROJECT", "IMAGE", "CLOUD_IMAGE", "SECRET", "DATA"),
        *("PLATFORMS", "BEGIN", "PERMIT", "DEVICE", "DISK"),
        *("PORTS", "SOURCE", "END", "RUN", "PART", "FRUITLESS_STARTS", "RELEASE"),
        *("DNS_ZONE", "ADDRESS", "FOLLOW_S", "LASTED_S", "CLOUD_LOG"),
        *("ARGUMENTS", "CONFIG_JSON", "VARIABLES", "SECRETS"),
    )
)
"""Names that the launch sets, or that `host.sh` uses: it exports secrets."""
OF_THE_MACHINE = (
    *(MULTI_SLICE, "TPU_WORKER_", "TPU_PROCESS_", "JAX_COORDINATOR_"),
    *("JOB_COMPLETION_INDEX", "KUBERNETES_", "SLURM_"),
)
"""Beginnings of the names that tell each host its own place in its slice."""


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
    in_region: bool = False

    @property
    def offered(self) -> str:
        """Where its slice is to be had, and what to set, in words."""
        generation = self.slice.generation
        return (
            f"{generation.name} is known to be offered in "
            f"{', '.join(generation.zones)}: set launch.zones.{self.name} to one of "
            f"them"
        )

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of its node pools, one in each zone."""
        others = range(1, len(self.zones))
        return (self.resource, *(f"{self.resource}-{number}" for number in others))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A launch whose settings have been checked."""

    name: str
    settings: LaunchConfig
    islands: tuple[PlacedIsland, ...]
    cluster: GkeCluster
    """The coordinator's; only for GKE."""
    config_json: str
    """The config as the machines read it."""
    source: str
    """Where the first parameters come from; empty = they are drawn."""
    fruitless_starts: int
    """Starts of a process after which its machines are given back."""
    workers: tuple[str, ...] = ()
    """Names of the workers that have machines of their own; worker 0 first."""
    cache: str = ""
    """Folder of a bucket with the programs that its islands compiled; empty = each
    machine has a folder."""

    @property
    def secrets(self) -> dict[str, str]:
        """Names of the secrets with certificates, by the stem of the files in them."""
        islands = {peers.island(i.name).stem: i.resource for i in self.islands}
        workers = {peers.worker(n).stem: w for n, w in enumerate(self.workers)}
        owners = {COORDINATOR: self.coordinator, **islands, **workers}
        return {stem: f"{resource}-certificates" for stem, resource in owners.items()}

    def owner_of(self, stem: str) -> str:
        """Return the part of the run that has the certificates of this stem."""
        names = {peers.island(i.name).stem: i.name for i in self.islands}
        return names.get(stem, COORDINATOR)

    @property
    def coordinator(self) -> str:
        """Name of everything that is made for the coordinator."""
        return f"{self.name}-{COORDINATOR}"

    def account_of(self, owner: str) -> str:
        """Return the cloud's account of the machines of a part of the run."""
        own = self.settings.coordinator_account if owner == COORDINATOR else ""
        return own or self.settings.service_account

    @property
    def inside(self) -> str:
        """Host at which the coordinator is reached in its GKE cluster."""
        return in_cluster(self.coordinator, self.settings)

    def host_for(self, cluster: GkeCluster) -> str:
        """Return the host at which pods of that cluster dial the coordinator."""
        outside = self.settings.coordinator_address
        return self.inside if cluster == self.cluster else outside

    @property
    def permit(self) -> str:
        """Name of what lets the run begin once. It outlives the coordinator's disk: a
        disk that got lost is not taken for that of a new run."""
        return f"{self.coordinator}-{PERMIT}"

    def coordinator_arguments(self, address: str) -> tuple[str, ...]:
        """Return the coordinator's arguments of `diloco`, less `--init`."""
        return (
            *(COORDINATOR, f"{CONFIG_FOLDER}/{run_files.CONFIG}", "--workdir", WORKDIR),
            *("--bind", f"0.0.0.0:{PORT}", "--advertise", address),
            *("--certificates", CERTIFICATES),
        )

    def worker_arguments(self, worker: int) -> tuple[str, ...]:
        """Return the arguments of `diloco` of a worker on a machine of its own."""
        return (
            *("worker", f"{CONFIG_FOLDER}/{run_files.CONFIG}", "--index", f"{worker}"),
            *("--workdir", WORKDIR, "--listen", f"0.0.0.0:{PORT}"),
            *("--certificates", CERTIFICATES),
        )

    def init_arguments(self) -> tuple[str, ...]:
        """Return the additional arguments of a coordinator that begins a run."""
        return ("--init", self.source) if self.source else ("--init",)

    def island_arguments(
        self, island: PlacedIsland, address: str, notice_s: float
    ) -> tuple[str, ...]:
        """Return the arguments of `diloco` on the island's hosts, less the incarnation.

        notice_s: seconds from SIGTERM until the goodbye must be said.
        """
        return (
            *("island", f"{CONFIG_FOLDER}/{run_files.CONFIG}", "--name", island.name),
            *("--coordinator", address, "--workdir", WORKDIR),
            *("--certificates", CERTIFICATES, "--notice-s", f"{notice_s:g}"),
            *(("--cache", self.cache) if self.cache else ()),
        )

    def end_unix(self, now_unix: int) -> int:
        """Return the time at which every process ends, if it is launched now; 0 if
        there is none."""
        seconds = round(self.settings.max_hours * 3600)
        return now_unix + seconds if seconds else 0


def make_spec(config: Config, path: str, on: Backend, source: str = "") -> LaunchSpec:
    """Return the launch of the config read from `path`.

    source: hf:gs://BUCKET/FOLDER or run:gs://BUCKET/FOLDER, which the coordinator's
    machine reads; empty = the parameters are drawn.

    Raises ConfigError naming field, value and remedy.
    """
    settings = config.launch
    _check_needed(config, on)
    _check_data(config)
    _check_source(source)
    check_variables(config)
    name = settings.name or Path(path).stem
    if Path(path).name == run_files.CONFIG and not settings.name:
        raise ConfigError(
            "launch.name is empty, and config.json names no run; set launch.name"
        )
    islands = tuple(_place(name, config, island, on) for island in config.islands)
    coordinator = resource_name(name, COORDINATOR)
    if on == "gke":
        _check_zones(settings, islands)
        _check_clusters(settings, islands)
    workers = _workers(config, name, on, islands)
    resources = [pool for island in islands for pool in island.pools]
    resources += [coordinator, *workers]
    for resource in resources:
        if resources.count(resource) > 1:
            raise ConfigError(
                f"two parts of the run would be called {resource!r}; rename an island"
            )
    hosts = _host_config(config, islands, workers)
    return LaunchSpec(
        name=resource_name(name, ""),
        settings=settings,
        islands=islands,
        cluster=_cluster_of(settings),
        config_json=json.dumps(dataclasses.asdict(hosts), indent=2),
        source=source,
        fruitless_starts=hosts.placement.fruitless_starts,
        workers=workers,
        cache=of_launch(config.placement),
    )


def in_cluster(name: str, settings: LaunchConfig) -> str:
    """Return the host of the Service of that name, for pods of its cluster."""
    return f"{name}.{settings.namespace}.svc"


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


# ---- checks -------------------------------------------------------------------------


def _check_needed(config: Config, on: Backend) -> None:
    """Raise ConfigError for settings that are missing, or that no cloud knows."""
    settings = config.launch
    needed = ["project", "image", "cloud_image", "coordinator_zone"]
    needed += {
        "gke": ["cluster", "location"],
        "sky": ["coordinator_address", "dns_zone"],
    }.get(on, [])
    empty = [field for field in needed if not getattr(settings, field)]
    options = [f"--launch.{field.replace('_', '-')}" for field in empty]
    if zoneless := [name for name in config.islands if name not in settings.zones]:
        empty += [f"zones.{name}" for name in zoneless]
        zones = ", ".join(f"{name!r}: 'us-east5-a'" for name in zoneless)
        options.append(f"zones={{{zones}}} in the config")
    if empty:
        raise ConfigError(
            f"{', '.join(f'launch.{field}' for field in empty)} must be set for "
            f"`diloco launch --on {on}`: in the config, or as {', '.join(options)}"
        )
    if not re.fullmatch(r"[a-z][-a-z0-9]{4,28}[a-z0-9]", settings.project):
        raise ConfigError(
            f"launch.project = {settings.project!r} is no project id; `gcloud projects "
            f"list` shows yours"
        )
    # Without a host, each tool that pulls it has a registry of its own in mind.
    host, path, _ = settings.image.partition("/")
    if not path or not ("." in host or ":" in host):
        raise ConfigError(
            f"launch.image = {settings.image!r} does not begin with the host of a "
            f"registry; push it to one that the machines reach, and write "
            f"REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG, or "
            f"docker.io/{settings.image} if it is on Docker Hub"
        )


def _check_data(config: Config) -> None:
    """Raise ConfigError for files of this machine that no other machine would have."""
    settings, data = config.launch, config.run.data
    if settings.data and not re.match(r"gs://[^/]+/[^/]", settings.data):
        raise ConfigError(
            f"launch.data = {settings.data!r} is no gs://BUCKET/FOLDER; copy the text "
            f"to a bucket (`gcloud storage rsync -r FOLDER gs://BUCKET/FOLDER`)"
        )
    here = [path for path in data.paths if not is_bucket(path)]
    if here and not settings.data:
        raise ConfigError(
            f"data.paths = {', '.join(here)} is on this machine only; "
            f"copy it to a bucket (`gcloud storage rsync -r`) and name that as "
            f"launch.data = 'gs://BUCKET/FOLDER'"
        )
    if data.tokenizer and not settings.data:
        raise ConfigError(
            f"data.tokenizer = {data.tokenizer!r} is on this machine only; "
            f"copy it to a bucket beside the data, and name that as launch.data = "
            f"'gs://BUCKET/FOLDER'"
        )
    for section in ("model", "data", "sync", "outer", "inner"):
        for name, value in own_code(getattr(config.run, section)).items():
            if Path(value.rpartition(":")[0]).exists():
                raise ConfigError(
                    f"{section}.{name} = {value!r} is a file of this machine, and "
                    f"islands run what is in launch.image; install it there as a "
                    f"package and name it as 'package.module:name' (docs/tpu.md, The "
                    f"image)"
                )


def _check_source(source: str) -> None:
    """Raise ConfigError unless the coordinator's machine can find the source."""
    if not source or source.startswith(FROM_ISLAND):
        return
    kind, folder = read_init(source)
    if not is_bucket(folder):
        raise ConfigError(
            f"--init {source}: {folder} is a folder of this machine, and the "
            f"coordinator's machine reads the weights; copy it to a bucket (`gcloud "
            f"storage rsync -r {folder} gs://BUCKET/FOLDER`) and give --init "
            f"{kind}:gs://BUCKET/FOLDER"
        )


def _check_clusters(settings: LaunchConfig, islands: tuple[PlacedIsland, ...]) -> None:
    """Raise ConfigError for islands that would not reach the coordinator."""
    away = [i.name for i in islands if i.cluster != _cluster_of(settings)]
    if away and not settings.coordinator_address:
        raise ConfigError(
            f"launch.coordinator_address is empty, and {', '.join(away)} run in other "
            f"clusters than the coordinator; reserve an internal address in its subnet "
            f"(`gcloud compute addresses create`) and write it there, or a host name "
            f"that leads to it"
        )


def _check_zones(settings: LaunchConfig, islands: tuple[PlacedIsland, ...]) -> None:
    """Raise ConfigError for a zone in which its cluster cannot have nodes. A zonal
    cluster may have nodes in all zones of its region, like a regional one."""
    home, zone = _cluster_of(settings), settings.coordinator_zone
    fields = [("launch.coordinator_zone", zone, home, "", "")]
    for island in islands:
        generation, region = island.slice.generation, region_of(island.cluster.location)
        known = [zone for zone in generation.zones if region_of(zone) == region]
        offers = f" ({generation.name} is known in {', '.join(known)})" if known else ""
        field = f"launch.zones.{island.name}"
        fields += [
            (field, zone, island.cluster, offers, island.name) for zone in island.zones
        ]
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


# ---- places -------------------------------------------------------------------------


def _place(run: str, config: Config, island: str, on: Backend) -> PlacedIsland:
    """Return an island of the run of that name in its place. Raises ConfigError for one
    that the backend cannot place."""
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
    if on != "gke" and not found.generation.type_name:
        raise ConfigError(
            f"islands.{island}.topology = {found.topology!r}: the Cloud TPU API, and "
            f"so --on {on}, does not have {found.generation.name}; launch with --on gke"
        )
    if on == "sky" and not found.accelerator_type:
        raise ConfigError(
            f"islands.{island}.topology = {found.topology!r}: SkyPilot asks for slices "
            f"by accelerator type, and this shape has none; choose "
            f"{found.generation.name} with one of {', '.join(found.generation.shapes)},"
            f" or launch with --on gke or --on tpu_vm"
        )
    zones = zones_of(settings.zones[island])
    if on == "tpu_vm" and len(zones) > 1:
        raise ConfigError(
            f"launch.zones.{island} = {settings.zones[island]!r}: a queued resource "
            f"waits in one zone; write one, or launch with --on sky or --on gke, which "
            f"try one zone after the other"
        )
    if len(zones) > min(MAX_ZONES, len(set(zones))):
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
        cluster=_cluster_of(settings, island),
        in_region=island in config.regions(),
    )


def _cluster_of(settings: LaunchConfig, island: str = "") -> GkeCluster:
    """Return the cluster of an island, or of the coordinator. Raises ConfigError for a
    field that names none."""
    written = settings.clusters.get(island, "")
    parts = written.split("/") if written else [settings.location, settings.cluster]
    if len(parts) == 2:
        parts.insert(0, settings.project)
    if len(parts) != 3 or (written and not all(parts)):
        raise ConfigError(
            f"launch.clusters.{island} = {written!r}; write 'LOCATION/CLUSTER' or "
            f"'PROJECT/LOCATION/CLUSTER', such as 'us-central1/tpus'"
        )
    return GkeCluster(*parts)


def _workers(
    config: Config, name: str, on: Backend, islands: tuple[PlacedIsland, ...]
) -> tuple[str, ...]:
    """Return the names of the workers that have machines of their own. Raises
    ConfigError if they cannot have them."""
    placement, settings = config.placement, config.launch
    if placement.worker_addresses:
        raise ConfigError(
            f"placement.worker_addresses = {', '.join(placement.worker_addresses)}: a "
            f"launch places workers itself; leave them out"
        )
    if placement.workers == 1:
        return ()
    if on != "gke":
        raise ConfigError(
            f"placement.workers = {placement.workers} with --on {on}: only --on gke "
            f"makes machines for workers; leave it out, and the coordinator merges "
            f"itself"
        )
    away = [i.name for i in islands if i.cluster != _cluster_of(settings)]
    if away:
        raise ConfigError(
            f"placement.workers = {placement.workers}, and {', '.join(away)} run in "
            f"other clusters (launch.clusters), which do not reach the workers' pods; "
            f"leave one of them out"
        )
    return tuple(
        resource_name(name, f"worker-{worker}") for worker in range(placement.workers)
    )


# ---- the machines' config -----------------------------------------------------------


def _host_config(
    config: Config, placed: tuple[PlacedIsland, ...], workers: tuple[str, ...]
) -> Config:
    """Return the config for the machines, with the number of hosts of each slice, and
    where workers are.

    It leaves out the settings of this machine; the machines' command lines give their
    own.
    """
    here, launch = Placement(), config.launch
    linger_hours = launch.linger_hours if launch.when_done == "delete" else KEPT_HOURS
    placement = dataclasses.replace(
        config.placement,
        linger_s=config.placement.linger_s or 3600 * linger_hours,
        fruitless_starts=config.placement.fruitless_starts or FRUITLESS_STARTS,
        workdir=here.workdir,
        bind=here.bind,
        advertise=here.advertise,
        certificates=here.certificates,
        insecure=here.insecure,
        worker_addresses=tuple(
            f"{in_cluster(worker, launch)}:{PORT}" for worker in workers
        ),
    )
    run = dataclasses.replace(config.run, data=_copied(config))
    islands = {
        island.name: dataclasses.replace(
            config.islands[island.name], hosts=island.slice.hosts
        )
        for island in placed
    }
    require_worth(run)
    ordered = Config(run=run, islands=islands, placement=placement, launch=launch)
    return ordered.validate()


def _copied(config: Config) -> DataConfig:
    """Return the data's config with the paths that the machines have.

    Each machine has a copy of `launch.data`. That copy is all of the data or, for a
    mixture, has its folders by name. The tokenizer is in it, too. A path in a bucket
    is the same everywhere.
    """
    data = config.run.data
    paths: tuple[str, ...] = (DATA,) if config.launch.data else ()
    if len(data.weights) > 1 or any(map(is_bucket, data.paths)):
        paths = tuple(
            path if is_bucket(path) else f"{DATA}/{Path(path).name}"
            for path in data.paths
        )
    tokenizer = f"{DATA}/{Path(data.tokenizer).name}" if data.tokenizer else ""
    return dataclasses.replace(data, paths=paths, tokenizer=tokenizer)


# ---- environment variables of its processes ------------------------------------------
# `launch.environment` has values, `launch.secrets` names of secrets. A variable named
# NAME goes to every process. A variable named ISLAND:NAME goes to that island alone,
# and overcomes NAME there. "coordinator" may stand in the place of ISLAND.


def check_variables(config: Config) -> None:
    """Raise ConfigError, naming field, value and remedy, for a variable that a process
    must not have, or that would tell a secret."""
    settings, owners = config.launch, (COORDINATOR, *config.islands)
    for field in ("environment", "secrets"):
        for key, value in getattr(settings, field).items():
            owner, _, name = key.rpartition(":")
            if owner and owner not in owners:
                raise ConfigError(
                    f"launch.{field} names {owner!r}{suggest(owner, owners)}, but the "
                    f"parts of the run are {', '.join(owners)}"
                )
            _check_name(f"launch.{field}", name)
            if field == "environment":
                _check_value(f"launch.environment {key}", name, value)
            elif not SECRET.fullmatch(value):
                raise ConfigError(
                    f"launch.secrets {key}: its value cannot be the name of a secret; "
                    f"make one with `gcloud secrets create` (on GKE `kubectl create "
                    f"secret generic`) and write its name, never what is in it"
                )
    for owner in owners:
        plain, secret = variables_of(settings, owner)
        if both := sorted(plain.keys() & secret.keys()):
            raise ConfigError(
                f"launch.environment and launch.secrets both have {both[0]} for "
                f"{owner}; leave out one"
            )


def _check_name(field: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{field} has {name!r}, which names no variable: letters, digits and '_', "
            f"no digit first; write NAME, or ISLAND:NAME for one island"
        )
    if name in OF_THE_LAUNCH:
        raise ConfigError(
            f"{field} has {name}, which `diloco launch` sets itself; leave it out"
        )
    if name.startswith(OF_THE_MACHINE):
        raise ConfigError(
            f"{field} has {name}, which is another one on every host: the machines "
            f"know it, and an island is one slice; leave it out"
        )


def _check_value(field: str, name: str, value: str) -> None:
    if "\n" in value or "\0" in value:
        raise ConfigError(f"{field} = {value!r} has more than one line; write one")
    if CREDENTIAL.search(name) and not value.startswith("/"):
        # The value itself stays out of the message, which logs keep.
        raise ConfigError(
            f"{field} looks like a credential, and scripts, manifests and config.json "
            f"would show it; put it into a secret, and its name into launch.secrets"
        )
