"""Where a run's processes run: its placement, its islands, and machines of the cloud.

`Placement` says how long processes wait, too: every deadline follows from its one time
budget. `LaunchConfig` is the part of a config that only `diloco launch` reads.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from diloco_jax.config.fields import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    SECONDS,
    SOME_SECONDS,
    explained,
    setting,
)
from diloco_jax.files import S3

AnchorMemory = Literal["device", "pinned_host"]


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandConfig:
    """Mesh, batch and kernels of one island. Islands may differ in all of them.

    Example:
      >>> from diloco_jax import IslandConfig
      >>> IslandConfig(batch_size=16, mesh_data=2, mesh_fsdp=4).devices
      8
    """

    batch_size: int = setting(
        8,
        AT_LEAST_1,
        help="Sequences per step, over all devices and accumulation rounds.",
    )
    accumulation: int = setting(
        1, AT_LEAST_1, help="Rounds of gradient accumulation that a batch is cut into."
    )
    mesh_data: int = setting(
        1,
        AT_LEAST_1,
        help="Devices over which sequences are spread, each with its own parameters.",
    )
    mesh_fsdp: int = setting(
        1, AT_LEAST_1, help="Devices over which sequences and parameters are spread."
    )
    mesh_expert: int = setting(
        1,
        AT_LEAST_1,
        help="Devices over which sequences and the experts of a layer are spread; it "
        "divides model.experts.",
    )
    mesh_tensor: int = setting(
        1, AT_LEAST_1, help="Devices over which the work on a sequence is spread."
    )
    hosts: int = setting(
        1,
        AT_LEAST_1,
        help="Host processes of the island, each with an equal share of its devices.",
    )
    remat: Literal["none", "full", "dots", "attention"] = setting(
        "none",
        help="Rematerialization, what the backward pass computes again of a layer: "
        "nothing, all, all but the products with weights, all but attention.",
    )
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", help="Type in which the model computes; parameters stay float32."
    )
    attention: Literal["auto", "dot_product", "splash"] = setting(
        "auto",
        help='Attention kernel; "splash" is one for TPUs, which "auto" takes there.',
    )
    loss_chunk: int | None = setting(
        None,
        NOT_NEGATIVE,
        help="Tokens of each sequence whose logits are in memory at a time; 0 = all, "
        "None = as many as the vocabulary allows.",
    )
    anchor_memory: AnchorMemory = setting(
        "device",
        help="Memory that holds anchors, bases and residuals between takes and "
        "adoptions.",
    )
    step_seconds: float = setting(
        0.0,
        SECONDS,
        help="Emulated step time: a step takes at least this long, and the coordinator "
        "believes no island that says it is twice as fast; 0 = as fast as it goes.",
    )
    stands_for: str = setting(
        "", help='What this island stands in for, for people to read: "v6e-16".'
    )
    topology: str = setting(
        "",
        help='TPU slice it runs on: "v5p:4x4x4", "v6e:16x16"; empty = the devices of '
        "this machine.",
    )

    region: str = setting(
        "",
        help="Region of its machines, any name: of each publish, one island of those "
        "with the same name has a copy from the coordinator and gives it to the "
        "others; empty = that of its zones in launch.zones, or none.",
    )

    @property
    def devices(self) -> int:
        """Devices of the island's mesh."""
        return math.prod(self.mesh)

    @property
    def mesh(self) -> tuple[int, int, int, int]:
        """Sizes of the mesh: data, fsdp, expert, tensor."""
        return self.mesh_data, self.mesh_fsdp, self.mesh_expert, self.mesh_tensor

    @property
    def batch_multiple(self) -> int:
        """The number that `batch_size` must be a multiple of: each device has as many
        sequences in each round of accumulation."""
        return self.mesh_data * self.mesh_fsdp * self.mesh_expert * self.accumulation


SLOWEST_LINK_BITS_PER_S = 1e8
"""Rate below which a link counts as broken."""
FIRST_RETRY_S = 0.5
"""Longest first pause: an island that starts beside its coordinator is often the first
of the two, whatever the budget is."""


class _OfBudget:
    """A deadline that is so many times the budget, or such a part of it."""

    def __init__(self, times: int = 1, part: int = 1) -> None:
        self._times, self._part = times, part

    def __get__(self, deadlines: Deadlines, owner: type | None = None) -> float:
        return self._times * deadlines.budget_s / self._part


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds. A peer counts as gone after a silence of `budget_s`."""

    budget_s: float

    report_s = _OfBudget(part=10)
    """Longest time between two signs of life of an island."""
    lease_s = _OfBudget()
    """Silence after which an island's lease is over."""
    connect_s = _OfBudget(part=2)
    """Time for one attempt to connect, hello and welcome included."""
    idle_s = _OfBudget()
    """Time without a single byte after which a transfer is broken off."""
    rest_s = _OfBudget(3)
    """Time after which a connection that no transfer needed is closed."""
    retry_max_s = _OfBudget(part=10)
    """Longest pause between attempts."""
    another_key_s = _OfBudget(3)
    """Time for which an island whose key was revoked waits for another one."""
    stop_s = _OfBudget()
    """Time after which a process that was asked to end is killed."""
    flush_s = _OfBudget(3)
    """Time for which the flush at the end of a run waits for deltas."""
    pin_s = _OfBudget(6)
    """Time within which one fetch must end."""

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ValueError(
                f"placement.time_budget_s = {self.budget_s}; it must be above 0"
            )

    @property
    def retry_min_s(self) -> float:
        """First pause before an attempt is repeated."""
        return min(FIRST_RETRY_S, self.budget_s / 100)

    @property
    def retries_s(self) -> tuple[float, float]:
        """First and longest pause between attempts, for a `Backoff`."""
        return self.retry_min_s, self.retry_max_s

    @property
    def reunion_s(self) -> float:
        """Time within which islands that were cut off together are all back: the
        longest pause, and as long again to get through. Anchors that were being fetched
        are kept for as long."""
        return 2 * self.retry_max_s

    def join_s(self, octets: int) -> float:
        """Time within which a join that fetches so many bytes is done."""
        return self.pin_s + 8 * octets / SLOWEST_LINK_BITS_PER_S


ZONE = re.compile(r"([a-z]+-[a-z]+\d+)-(ai\d+)?[a-z]")
"""A zone's name, which begins with its region's."""


def region_of(zone: str) -> str:
    """Return the region of a zone; a region is its own."""
    return match[1] if (match := ZONE.fullmatch(zone)) else zone


def zones_of(written: str) -> tuple[str, ...]:
    """Return the zones of a value of `LaunchConfig.zones`."""
    return tuple(re.split(r"[,\s]+", written.strip()))


WhenDone = Literal["delete", "keep"]


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Settings of diloco launch: places of the run and purchase of its machines."""

    project: str = setting("", help="Project id of the cloud.")
    name: str = setting(
        "",
        help="Beginning of the name of everything that is made; empty = the name of "
        "the configs file.",
    )
    image: str = setting(
        "",
        help="Container image of this package that all machines run: "
        "REGISTRY/PATH:TAG.",
    )
    zones: dict[str, str] = setting(
        {},
        help='Zone by island: "us-east5-a", or several, "us-east5-a,us-east5-b", of '
        "which each is tried if those before it have no machines (not on tpu_vm).",
    )
    purchase: dict[str, str] = setting(
        {},
        help='How an island\'s machines are bought: "on_demand" (if it is not named '
        'here), "spot", "reserved", or "reserved:NAME" of one reservation.',
    )
    network: str = setting("default", help="Network of all machines.")
    subnetwork: str = setting(
        "", help="Subnetwork, of the same name in every region; empty = the network's."
    )
    internal_ips: bool = setting(
        False,
        help="Give machines no external address; needs Cloud NAT or Private Google "
        "Access.",
    )
    service_account: str = setting(
        "",
        help="E-mail address that machines run as; empty = the project's default "
        "account.",
    )
    coordinator_account: str = setting(
        "", help="The same for the coordinator, if it is another one than the islands'."
    )
    when_done: WhenDone = setting(
        "delete",
        help='What becomes of machines whose process has ended for good: "delete" = '
        'they are given back, the coordinator\'s disk excepted, "keep" = they stay '
        "until --action delete.",
    )
    max_hours: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Hours after a create or run at which every process that it started ends "
        "in any case, merged or not; 0 = no end.",
    )
    linger_hours: float = setting(
        24.0,
        NOT_NEGATIVE,
        help="Hours after the end of the run for which the coordinator tells islands "
        "that get their machines then that it is over.",
    )
    data: str = setting(
        "",
        help="gs://BUCKET/FOLDER of text or tokens that every machine copies; empty = "
        "the Python standard library of the image.",
    )
    environment: dict[str, str] = setting(
        {},
        help="Environment variables of every process, such as XLA_FLAGS, "
        "LIBTPU_INIT_ARGS or HF_HOME; ISLAND:NAME is one island's.",
    )
    secrets: dict[str, str] = setting(
        {},
        help="Environment variables whose values are secrets, and the secrets' names: "
        "of Secret Manager, or on GKE of the namespace, with the variable's name as "
        "key.",
    )
    cloud_image: str = setting(
        "gcr.io/google.com/cloudsdktool/google-cloud-cli:slim",
        help="Image with `gcloud`, for what machines ask of the cloud.",
    )
    coordinator_zone: str = setting("", help="Zone of the coordinator.")
    coordinator_machine: str = setting(
        "n2-highmem-16", help="Machine type of the coordinator."
    )
    coordinator_disk_gb: int = setting(
        500, AT_LEAST_1, help="Gigabytes of the disk with the coordinator's workdir."
    )
    coordinator_address: str = setting(
        "",
        help="Host name or internal address at which islands reach the coordinator "
        "from outside its GKE cluster, or on sky; empty = its name in the cluster.",
    )
    dns_zone: str = setting(
        "",
        help="Managed zone of Cloud DNS in which, on sky, the coordinator registers "
        "coordinator_address.",
    )
    cluster: str = setting("", help="GKE cluster of the coordinator, and of islands.")
    location: str = setting("", help="Region or zone of that cluster.")
    clusters: dict[str, str] = setting(
        {},
        help='Other clusters by island: "us-central1/tpus", or with a project before.',
    )
    queue: str = setting(
        "", help="Kueue's local queue in which islands wait; empty = none."
    )
    namespace: str = setting("default", help="Kubernetes namespace.")


class Variables(NamedTuple):
    """The variables of one part of the run. Both are by the variable's name."""

    plain: Mapping[str, str]
    secret: Mapping[str, str]
    """Names of secrets."""


def variables_of(settings: LaunchConfig, owner: str) -> Variables:
    """Return the variables of an island, or of the coordinator: its own, named
    OWNER:NAME, count before those of every process."""
    return Variables(_of(settings.environment, owner), _of(settings.secrets, owner))


def _of(given: Mapping[str, str], owner: str) -> dict[str, str]:
    everybodys = {name: value for name, value in given.items() if ":" not in name}
    own = {
        name.rpartition(":")[2]: value
        for name, value in given.items()
        if name.rpartition(":")[0] == owner
    }
    return everybodys | own


MergeRoute = Literal["auto", "native", "xla"]

DEADLINES = "deadline"
CHECKPOINTS = "checkpoint"
EVALUATION = "evaluation"
METRICS = "metric"
PROCESSES = "process"
"""Groups of options that few runs set."""


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Addresses, folders, deadlines and injected faults of the processes.

    Example:
      >>> from diloco_jax import Config
      >>> config = Config().replace("faults", ("a@30:kill",))  # at island a's 30th step
      >>> config.placement.faults
      ('a@30:kill',)
    """

    workdir: str = setting(
        "", help="Folder of the run; empty = runs/CONFIG-TIME in the current folder."
    )
    bind: str = setting(
        "127.0.0.1:0",
        help="HOST:PORT of the coordinator; port 0 = any free one. Bulk is served at "
        "the next port.",
    )
    advertise: str = setting(
        "",
        help="HOST:PORT that islands dial, and the next port for bulk; empty = the "
        "bound address.",
    )
    certificates: str = setting(
        "", help="Folder made by diloco certs; required on any but a loopback address."
    )
    insecure: bool = setting(
        False,
        help="Serve an address that is not loopback, or a local run, without TLS.",
    )
    admit: tuple[str, ...] = setting(
        (),
        help="Names of islands that may join although this config does not describe "
        "them; all others are refused.",
    )
    rehearse: bool = setting(
        False,
        help="Have each island try a fixed step and a round trip before its first "
        "step, and the coordinator its disk at the end, for the run's records; diloco "
        "rehearse sets it.",
    )
    first_from: str = setting(
        "",
        help="Island whose parameters a new run begins with, as --init gives it; "
        "empty = they are drawn, or those of model.weights.",
    )
    time_budget_s: float = setting(
        10.0,
        SOME_SECONDS,
        group=DEADLINES,
        help="The one time budget: seconds of silence after which a peer counts as "
        "gone. Leases, retries and deadlines follow from it.",
    )
    outage_budget_s: float = setting(
        60.0,
        SOME_SECONDS,
        group=DEADLINES,
        help="Least seconds of data that an island holds, to train through a "
        "coordinator's outage; it is as long as a restart takes by the size of the "
        "state and launch.coordinator_disk_gb, if that is longer.",
    )
    compile_budget_s: float = setting(
        600.0,
        SOME_SECONDS,
        group=DEADLINES,
        help='Most seconds that an island may report "compiling", its hosts\' waiting '
        "for each other included. An island waits as long for a coordinator that has "
        "not let it in yet.",
    )
    hang_budget_s: float = setting(
        600.0,
        SECONDS,
        group=DEADLINES,
        help="Seconds without a step or a boundary after which an island's process "
        "says where it hangs and ends, to be started again; the parts of its start "
        "have these beyond their own deadlines; 0 = it never does. Loops of your own "
        "are not watched.",
    )
    hosts_budget_s: float = setting(
        1800.0,
        SOME_SECONDS,
        group=DEADLINES,
        help="Most seconds between the starts of an island's hosts, the pulls of "
        "images and the copies of text included.",
    )
    notice_s: float = setting(
        0.0,
        SECONDS,
        group=DEADLINES,
        help="Seconds in which an island whose machine is to be taken away sends what "
        "is open and says goodbye. Above 0, SIGTERM or the cloud's "
        "metadata server gives notice, and the island ends with exit code 1, to be "
        "started again.",
    )
    linger_s: float = setting(
        0.0,
        SECONDS,
        group=DEADLINES,
        help="Seconds after the end of the run in which the coordinator goes on "
        "answering, to tell islands that come then that it is over; they end with exit "
        "code 0.",
    )
    checkpoints: str = setting(
        "",
        group=CHECKPOINTS,
        help="Folder, or gs://BUCKET/FOLDER, of the coordinator's snapshots and the "
        "islands' checkpoints; empty = checkpoints in the workdir. s3://BUCKET/FOLDER "
        "takes the snapshots alone.",
    )
    snapshot_every_s: float = setting(
        30.0,
        SOME_SECONDS,
        group=CHECKPOINTS,
        help="Seconds between two snapshots of the coordinator.",
    )
    snapshots_kept: int = setting(
        2, AT_LEAST_1, group=CHECKPOINTS, help="Newest snapshots that are kept."
    )
    export_every: int = setting(
        0,
        NOT_NEGATIVE,
        group=CHECKPOINTS,
        help="Cycles between two whose parameters are kept in the workdir, for diloco "
        "export --cycle; 0 = none is, unless somebody exports the running run. Keeping "
        "one takes up to 4 bytes per parameter of the coordinator's memory, and as "
        "many on its disk.",
    )
    exports_kept: int = setting(
        2,
        AT_LEAST_1,
        group=CHECKPOINTS,
        help="Newest kept cycles that stay in the workdir.",
    )
    checkpoint_every_s: float = setting(
        600.0,
        SECONDS,
        group=CHECKPOINTS,
        help="Seconds between two checkpoints of an island; 0 = none, and a returned "
        "island begins with fresh moments.",
    )
    checkpoints_kept: int = setting(
        2,
        AT_LEAST_1,
        group=CHECKPOINTS,
        help="Newest checkpoints that are kept of each island.",
    )
    evaluate_every_steps: int = setting(
        0,
        NOT_NEGATIVE,
        group=EVALUATION,
        help="Local steps between an island's own validation passes; 0 = none.",
    )
    evaluate_batches: int = setting(
        8,
        AT_LEAST_1,
        group=EVALUATION,
        help="Batches of one such validation pass, and of one over a merged model.",
    )
    watch_every: int = setting(
        0,
        NOT_NEGATIVE,
        group=EVALUATION,
        help="Cycles between two whose merged model one of the islands evaluates, a "
        "batch between two steps; they take turns; 0 = none is. The copy takes each "
        "island's devices the size of the parameters in the compute dtype.",
    )
    baseline_learning_rate: float = setting(
        0.0,
        NOT_NEGATIVE,
        group=EVALUATION,
        help="Learning rate of diloco run --baseline, swept for its batch size; 0 = "
        "the inner one.",
    )
    bulk_channels: int = setting(
        4,
        AT_LEAST_1,
        group=PROCESSES,
        help="Connections per island for fragments, besides the one for control.",
    )
    merge_buffer_bytes: int = setting(
        4 << 30,
        AT_LEAST_1,
        group=PROCESSES,
        help="Bytes of memory for encoded deltas that wait for their merge. The rest "
        "waits on the disk of the workdir: at most two deltas of everything per "
        "island. The end of a run opens as many fragments at once as fit.",
    )
    workers: int = setting(
        1,
        AT_LEAST_1,
        group=PROCESSES,
        help="Machines that merge and serve fragments, each its own share of them, by "
        "`diloco worker`; 1 = the coordinator's own process does.",
    )
    worker_addresses: tuple[str, ...] = setting(
        (),
        group=PROCESSES,
        metavar="[HOST:PORT [HOST:PORT ...]]",
        help="Where each of the workers runs `diloco worker`, worker 0 first, which "
        "serves islands at the next port; a launch fills it in.",
    )
    merge_route: MergeRoute = setting(
        "auto",
        group=PROCESSES,
        help='How the coordinator computes merges: "native" = functions in C, which '
        'are compiled at first use and need a C compiler, "xla" = compiled by XLA, '
        'about three times the CPU; "auto" = native where there is a compiler. The '
        "bits are the same.",
    )
    sinks: tuple[str, ...] = setting(
        ("tensorboard",),
        group=METRICS,
        help='Where curves go besides metrics.jsonl: "tensorboard" = the folder '
        'tensorboard of the workdir, "wandb" = Weights & Biases, which the extra '
        "wandb installs.",
    )
    metrics_bind: str = setting(
        "",
        group=METRICS,
        metavar="HOST:PORT",
        help="Where Prometheus collects the run's numbers from the coordinator, at "
        "/metrics: 127.0.0.1:9464; empty = nowhere. On any but a loopback address it "
        "asks by TLS, with a reader's certificate.",
    )
    restarts: int = setting(
        5,
        NOT_NEGATIVE,
        group=PROCESSES,
        help="Times in a row that diloco run restarts one crashed process; ten minutes "
        "in which it ran end the row.",
    )
    fruitless_starts: int = setting(
        0,
        NOT_NEGATIVE,
        group=PROCESSES,
        help="Starts of an island in a row that end in a failure before the first "
        "step, after which the coordinator lets it in no more; 0 = any number. An "
        "island that is refused ends with exit code 3, and its machines can be given "
        "back.",
    )
    restart_delay_s: float = setting(
        1.0, SECONDS, group=PROCESSES, help="Seconds before such a restart."
    )
    faults: tuple[str, ...] = setting(
        (),
        group=PROCESSES,
        help="Faults to inject, WHO@STEP:ACTION: v5p-a@40:kill, v5p-a@40:pause15, "
        "v5p-a@40:hang, v5p-a@40:nan and v5p-a@40:scale100 (its parameters), "
        "v5p-a@40:slow4 (its steps), v5p-a@40:starve0.3 (its batches), "
        "v5p-a/1@40:kill (its host 1), coordinator@12:kill or worker-1@12:kill (a step "
        "is a merge; kill-prepared: before its commit). More: docs/chaos.md.",
    )

    @property
    def islands_checkpoints(self) -> str:
        """Folder of islands' checkpoints, and of what lies beside them; empty = the
        workdir. orbax writes to folders and to gs:// alone."""
        return "" if self.checkpoints.startswith(S3) else self.checkpoints

    @property
    def away_s(self) -> float:
        """Seconds for which an island that no coordinator has let in yet waits for one:
        its machine may still start, or it may gather its state."""
        return max(self.outage_budget_s, self.compile_budget_s)

    @property
    def patience_s(self) -> float:
        """Seconds for which an island without data waits before it ends."""
        return 3 * self.outage_budget_s

    @property
    def alone_s(self) -> float:
        """Least seconds that an island lasts without a coordinator: it trains on the
        data that it holds, and then waits for `patience_s`.
        """
        return self.outage_budget_s + self.patience_s

    @property
    def deadlines(self) -> Deadlines:
        """Every deadline, as it follows from `time_budget_s`."""
        return Deadlines(self.time_budget_s)
