"""A checked launch order: the names, places and command lines that both backends share.

Nothing is asked of the cloud here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    LaunchConfig,
    Placement,
    own_code,
)
from diloco_jax.files import is_bucket
from diloco_jax.launch.images import check_image
from diloco_jax.launch.nodes import (
    PlacedNode,
    check_reached,
    place_nodes,
)
from diloco_jax.launch.placing import (
    Backend,
    GkeCluster,
    PlacedIsland,
    check_clusters,
    check_zones,
    cluster_of,
    place,
    resource_name,
)
from diloco_jax.launch.variables import check_variables
from diloco_jax.weights.init_option import FROM_ISLAND, read_init
from diloco_jax.wire import principal

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
PERMIT = "begin"
"""File on the coordinator's disk: the run may begin there. It comes there once."""

LOG_LINES = 100
"""Last lines of each process that `--action logs` shows."""
FRUITLESS_STARTS = 20
"""`placement.fruitless_starts` of a launch whose config has none. Machines count by it
too: whoever fails before its hello is not heard by the coordinator."""
LASTED_S = 600
"""Seconds of progress after which a process may crash as often again."""
KEPT_HOURS = 24.0 * 365
"""Hours for which a coordinator lingers whose machine is not to be given back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """A launch whose settings have been checked."""

    name: str
    settings: LaunchConfig
    islands: tuple[PlacedIsland, ...]
    nodes: tuple[PlacedNode, ...]
    """The coordinator."""
    config_json: str
    """The config as the machines read it."""
    source: str = ""
    """Where the first parameters come from; empty = they are drawn."""
    ports: tuple[int, ...] = (PORT, PORT + 1)
    """Ports of the coordinator, see `Placement.ports`."""
    fruitless_starts: int = FRUITLESS_STARTS
    """Starts of a process in a row, without lasting progress, before its machines are
    given back."""
    workers: tuple[str, ...] = ()
    """Names of the workers that have machines of their own; worker 0 first."""
    ends_unix: int = 0
    """End of all processes, if it is set already."""

    @property
    def secrets(self) -> dict[str, str]:
        """Names of the secrets with certificates, by the stem of the files in them."""
        islands = {principal.island(i.name).stem: i.resource for i in self.islands}
        workers = {principal.worker(n).stem: w for n, w in enumerate(self.workers)}
        nodes = {node.stem: node.resource for node in self.nodes}
        owners = {**nodes, **islands, **workers}
        return {stem: f"{resource}-certificates" for stem, resource in owners.items()}

    def owner_of(self, stem: str) -> str:
        """Return the part of the run that has the certificates of this stem."""
        names = {principal.island(i.name).stem: i.name for i in self.islands}
        return names.get(stem, COORDINATOR)

    @property
    def cluster(self) -> GkeCluster:
        """The coordinator's cluster; only for GKE."""
        return self.nodes[0].cluster

    @property
    def coordinator(self) -> str:
        """Name of everything that is made for the coordinator."""
        return self.nodes[0].resource

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
            *("--coordinator", address),
            *("--workdir", WORKDIR),
            *("--certificates", CERTIFICATES, "--notice-s", f"{notice_s:g}"),
        )

    def end_unix(self, now_unix: int) -> int:
        """Return the time at which every process ends, if it is launched now; 0 if
        there is none."""
        seconds = round(self.settings.max_hours * 3600)
        return self.ends_unix or (now_unix + seconds if seconds else 0)


def make_order(config: Config, path: str, on: Backend, source: str = "") -> Order:
    """Return the launch of the config read from `path`.

    source: hf:gs://BUCKET/FOLDER or run:gs://BUCKET/FOLDER, which the coordinator's
    machine reads; empty = the parameters are drawn.

    Raises ConfigError naming field, value and remedy.
    """
    settings = config.launch
    needed = ("project", "image", "cloud_image", "coordinator_zone", *_needed(on))
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
    check_image(settings.image)
    if settings.data and not re.match(r"gs://[^/]+/[^/]", settings.data):
        raise ConfigError(
            f"launch.data = {settings.data!r} is no gs://BUCKET/FOLDER; copy the text "
            f"to a bucket (`gcloud storage rsync -r FOLDER gs://BUCKET/FOLDER`)"
        )
    here = [path for path in config.run.data.paths if not is_bucket(path)]
    if here and not settings.data:
        raise ConfigError(
            f"data.paths = {', '.join(here)} is on this machine only; "
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
    islands = tuple(place(name, config, island, on) for island in config.islands)
    nodes = place_nodes(config, name)
    if on == "gke":
        check_zones(settings, islands)
        check_clusters(settings, islands)
        check_reached(nodes, islands)
    workers = _workers(config, name, on, islands)
    resources = [pool for island in islands for pool in island.pools]
    resources += [*(node.resource for node in nodes), *workers]
    for resource in resources:
        if resources.count(resource) > 1:
            raise ConfigError(
                f"two parts of the run would be called {resource!r}; rename an island"
            )
    hosts = _host_config(config, islands, workers)
    return Order(
        name=resource_name(name, ""),
        settings=settings,
        islands=islands,
        nodes=nodes,
        config_json=json.dumps(dataclasses.asdict(hosts), indent=2),
        source=source,
        ports=tuple(range(PORT, PORT + hosts.placement.ports)),
        fruitless_starts=hosts.placement.fruitless_starts,
        workers=workers,
    )


def _workers(
    config: Config, name: str, on: Backend, islands: tuple[PlacedIsland, ...]
) -> tuple[str, ...]:
    """Return the names of the workers that have machines of their own. Raises
    ConfigError if they cannot have them."""
    placement, settings = config.placement, config.launch
    if placement.worker_addresses:
        raise ConfigError(
            f"placement.worker_addresses = {', '.join(placement.worker_addresses)}: a "
            f"launch places workers itself; leave them out, and set "
            f"launch.workers_apart for machines of their own"
        )
    if not settings.workers_apart:
        return ()
    if on != "gke":
        raise ConfigError(
            f"launch.workers_apart = True with --on {on}: only --on gke makes machines "
            f"for workers; leave it out, and workers run on the coordinator's machine"
        )
    if placement.workers == 1:
        raise ConfigError(
            "launch.workers_apart = True and placement.workers = 1: the coordinator "
            "merges itself; give at least 2 workers, or leave it out"
        )
    away = [i.name for i in islands if i.cluster != cluster_of(settings)]
    if away:
        raise ConfigError(
            f"launch.workers_apart = True, and {', '.join(away)} run in other clusters "
            f"(launch.clusters), which do not reach the workers' pods; leave one of "
            f"them out"
        )
    return tuple(
        resource_name(name, f"worker-{worker}") for worker in range(placement.workers)
    )


def worker_host(name: str, settings: LaunchConfig) -> str:
    """Return the name by which the others reach a worker's pod."""
    return f"{name}.{settings.namespace}.svc"


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


def _needed(on: Backend) -> tuple[str, ...]:
    needed = {
        "gke": ("cluster", "location"),
        "sky": ("coordinator_address", "dns_zone"),
    }
    return needed.get(on, ())


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


def _host_config(
    config: Config,
    placed: tuple[PlacedIsland, ...],
    workers: tuple[str, ...],
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
            f"{worker_host(worker, launch)}:{PORT}" for worker in workers
        ),
    )
    run = dataclasses.replace(config.run, data=_copied(config))
    islands = {
        island.name: dataclasses.replace(
            config.islands[island.name], hosts=island.slice.hosts
        )
        for island in placed
    }
    ordered = Config(run=run, islands=islands, placement=placement, launch=launch)
    return ordered.validate()
