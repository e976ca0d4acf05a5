"""The placement of a run: where processes run, how long they wait, which faults to
inject."""

from __future__ import annotations

import dataclasses
from typing import Literal

from diloco_jax.config.fields import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    SECONDS,
    SOME_SECONDS,
    setting,
)
from diloco_jax.deadlines import Deadlines

MergeRoute = Literal["auto", "native", "xla"]

DEADLINES = "deadline"
CHECKPOINTS = "checkpoint"
EVALUATION = "evaluation"
ALERTS = "alert"
METRICS = "metric"
PROCESSES = "process"
"""Groups of options that few runs set."""


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
    alert_command: str = setting(
        "",
        group=ALERTS,
        help="Command that the coordinator gives new alerts on standard input, one in "
        'a line, at most once a minute: "mail -s diloco me@example.org". It is not run '
        "by a shell.",
    )
    alert_url: str = setting(
        "",
        group=ALERTS,
        help="URL to which it posts new alerts as JSON, at most once a "
        "minute; the text is in the field that chats read.",
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
        "coordinator@12:kill or worker-1@12:kill (a step is a merge).",
    )

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
