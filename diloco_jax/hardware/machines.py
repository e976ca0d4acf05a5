"""The coordinator's machines and disks: published sizes and rates, and measured ones.

Published, as of 2026-11-24. A vCPU is a hardware thread, and so is each core of the
machines on which this package measures its rates. Each row of the tables names the page
that it is from:

- N2, C3: cloud.google.com/compute/docs/general-purpose-machines, tables "N2 standard",
  "N2 high-mem", "C3 highmem": vCPUs, memory, default egress bandwidth. Its "GB" is 2^30
  bytes (cloud.google.com/compute/vm-instance-pricing).
- M3: docs.cloud.google.com/sap/docs/certifications-sap-apps, updated 2026-04-09:
  vCPUs, memory in GiB. It does not give the bandwidth.
- DISK: github.com/GoogleCloudPlatform/gcpdiag at 9f84bc0, gcpdiag/runbook/gce/
  disk_performance_benchmark/{limits_per_gb,n-family,c-family,m-family}.json:
  pd-balanced, write and read throughput in MiB/s; the table on
  cloud.google.com/compute/docs/disks/performance has the same per GiB and at most.

Measured, by the package's benchmarks, are `CONSTANTS` and `NATIVE`. Every `WeightedSum`
is merged by the same passes, of which `MachineRates` has the rates. The other kinds of
merge rules do more, and need not grow in proportion to the deltas: a sort does not. So
a rule has points, and the cost between two of them follows a power of the number. What
a user has measured comes as `Measurements`, and counts before all of these.

Islands train on without the coordinator, so the data that they hold, and every wait for
it, must last through its restart. The processes of a run know the model and the disk;
`diloco plan` knows the length of a cycle, too, and refuses a run whose islands do not
last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from diloco_jax.config import Config
from diloco_jax.config.fields import LARGEST
from diloco_jax.config.placement import MergeRoute
from diloco_jax.errors import ConfigError, suggest
from diloco_jax.hardware.tpus import GENERATIONS, GIB

if TYPE_CHECKING:
    from diloco_jax.compilation import Route


MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Machine:
    """One machine type."""

    name: str
    gib: int
    """GiB of memory."""
    egress_gbit_per_s: float | None
    """Highest rate to all peers and its disk together; None if it is not known."""
    disk_mib_per_s: int = 1200
    """Highest rate of its pd-balanced disk, whatever the disk's size."""

    @property
    def cores(self) -> int:
        """Its vCPUs, with which its name ends."""
        return int(self.name.rpartition("-")[2])

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return self.gib * GIB

    @property
    def disk_bytes_per_s(self) -> float:
        """Highest rate of its disk in bytes per second."""
        return float(self.disk_mib_per_s * MIB)


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("n2-standard-2", 8, 10, 240),  # N2; DISK "2-7"
        Machine("n2-standard-4", 16, 10, 240),  # N2; DISK "2-7"
        Machine("n2-standard-8", 32, 16, 800),  # N2; DISK "8-15"
        Machine("n2-standard-16", 64, 32),  # N2; DISK "16-31"
        Machine("n2-standard-32", 128, 32),  # N2; DISK "32-63"
        Machine("n2-standard-48", 192, 32),  # N2; DISK "32-63"
        Machine("n2-standard-64", 256, 32),  # N2; DISK "64 or more"
        Machine("n2-highmem-2", 16, 10, 240),  # N2; DISK "2-7"
        Machine("n2-highmem-4", 32, 10, 240),  # N2; DISK "2-7"
        Machine("n2-highmem-8", 64, 16, 800),  # N2; DISK "8-15"
        Machine("n2-highmem-16", 128, 32),  # N2; DISK "16-31"
        Machine("n2-highmem-32", 256, 32),  # N2; DISK "32-63"
        Machine("n2-highmem-48", 384, 32),  # N2; DISK "32-63"
        Machine("n2-highmem-64", 512, 32),  # N2; DISK "64 or more"
        Machine("n2-highmem-80", 640, 32),  # N2; DISK "64 or more"
        Machine("n2-highmem-96", 768, 32),  # N2; DISK "64 or more"
        Machine("n2-highmem-128", 864, 32),  # N2; the page of M3 says 838; DISK
        Machine("c3-highmem-176", 1408, 100),  # C3; DISK "176"
        Machine("m3-megamem-128", 1952, None),  # M3; DISK "m3-megamem-128"
        Machine("m3-ultramem-128", 3904, None),  # M3; DISK "m3-ultramem-128"
    )
}
"""Machine types by name."""
MOST_DISK_GB = 65_536
"""Size of the largest pd-balanced disk: 64 TiB (N2: "maximum size per Persistent
Disk")."""
DISK_MOST_MIB_PER_S = 1200
"""The most that any of these machines takes, by the rows above."""
DISK_BASE_MIB_PER_S = 140.0
"""DISK, "Baseline Throughput (MiBps) per VM"."""
DISK_MIB_PER_S_PER_GIB = 0.28
"""DISK, "Throughput per GiB (MiBps)"."""


def machine_of(name: str) -> Machine:
    """Return a machine type; ConfigError if the table does not have it."""
    if name not in MACHINES:
        raise ConfigError(
            f"launch.coordinator_machine = {name!r}: its cores and memory are not "
            f"known; choose from {', '.join(MACHINES)}"
        )
    return MACHINES[name]


def smallest_machine(
    memory: float,
    cores: int,
    egress_gbit_per_s: float = 0.0,
    disk_mib_per_s: float = 0.0,
) -> Machine | None:
    """Return the machine with the least memory that has enough; None if none has. A
    machine whose bandwidth is not known is enough only where none is asked for."""
    enough = [
        m
        for m in MACHINES.values()
        if m.memory >= memory
        and m.cores >= cores
        and (m.egress_gbit_per_s or 0.0) >= egress_gbit_per_s
        and m.disk_mib_per_s >= disk_mib_per_s
    ]
    return min(enough, key=lambda m: (m.memory, m.cores), default=None)


def disk_bytes_per_s(gigabytes: int) -> float:
    """Return what a pd-balanced disk of this size reads or writes per second, on a
    machine with many cores."""
    by_size = DISK_BASE_MIB_PER_S + DISK_MIB_PER_S_PER_GIB * gigabytes
    return min(by_size, DISK_MOST_MIB_PER_S) * MIB


class RuleRates(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one rule beyond that of a weighted sum."""

    beyond_core_seconds: tuple[tuple[int, float], ...]
    """(deltas, core seconds per 1e9 parameters), by deltas: at least two, above 0."""
    rule_from: str
    """Command, machine and date."""

    def beyond(self, deltas: int) -> float:
        """Return the core seconds per 1e9 parameters of a merge of so many deltas.

        Fewer than the first point has cost as much as it; beyond the last point the
        power of the last two goes on.
        """
        points = self.beyond_core_seconds
        if deltas <= points[0][0]:
            return points[0][1]
        around = (pair for pair in pairwise(points) if deltas <= pair[1][0])
        (few, less), (many, more) = next(around, points[-2:])
        power = math.log(more / less) / math.log(many / few)
        return float(less * (deltas / few) ** power)

    def line(self, rule: str) -> str:
        """Return a line for people."""
        points = ", ".join(
            f"{seconds:.3g} for {deltas}"
            for deltas, seconds in self.beyond_core_seconds
        )
        return (
            f"rule {rule}, core seconds per 1e9 parameters beyond a weighted sum, by "
            f"deltas: {points} [{self.rule_from}]"
        )


RULES_FROM = (
    "constant: `python benchmarks/merging.py --rules`, 2 cores, Intel Xeon, 2026-11-27"
)
RULES_OF_PACKAGE: dict[Route, dict[str, RuleRates]] = {
    "native": {
        "trimmed_mean": RuleRates(
            beyond_core_seconds=((2, 3.2), (8, 11.2), (64, 248.0)), rule_from=RULES_FROM
        )
    },
    "xla": {
        "trimmed_mean": RuleRates(
            beyond_core_seconds=((2, 2.2), (8, 7.1), (64, 216.0)), rule_from=RULES_FROM
        )
    },
}
"""Rules of the package that are no weighted sums, by merge route: what they take less
what `mean` takes in results/raw/merging.md, int8, 4 Mi elements. XLA computes them on
either route. So by "xla" a merge takes what it takes by "native", with the checks and
the publish of that route; beyond its weighted sum this is less."""


class MachineRates(msgspec.Struct, frozen=True, kw_only=True):
    """Work that a core does, and the rate of memory."""

    merge_core_seconds: dict[str, float]
    """Core seconds per 1e9 parameters of a merge by a weighted sum, whatever its
    deltas: the outer step and the encoded publish. By codec of the publish."""
    delta_core_seconds: dict[str, float]
    """Core seconds per 1e9 parameters of each delta, its check on arrival included. By
    codec of the deltas."""
    rules: dict[str, RuleRates]
    """Costs of rules beyond that, by `sync.merge`."""
    replay_core_seconds: dict[str, float]
    """Core seconds per 1e9 parameters of a publish in recovery, which decodes it, adds
    it and advances the outer optimizer by it. By codec of the publish."""
    merge_route: str
    """Route of the measured merges: "native" or "xla"."""
    whole_merge_core_seconds: float | None = None
    """Core seconds per 1e9 parameters of a merge of the run's deltas by its rule, in
    place of all of the above; None if nobody measured it."""
    upload_core_seconds: float
    """Core seconds of the coordinator per GB that arrives, with mutual TLS."""
    fetch_core_seconds: float
    """The same per GB that is fetched from it."""
    write_core_seconds: float
    """Core seconds per GB of sealed files that are written."""
    draw_core_seconds: float
    """Core seconds per 1e9 parameters that are drawn when a run begins."""
    read_core_seconds: float
    """The same of those that are read into new memory, and checked."""
    digest_core_seconds: float
    """Core seconds per GB of own values that a digest goes over."""
    sha256_core_seconds: float
    """The same of values that a peer may be asked for."""
    copy_bytes_per_s: float
    """Bytes that one core copies per second. It tells how machines compare: merges are
    bound by memory."""
    merge: str
    """`sync.merge` of the measured weighted sums."""
    outer: str
    """`outer.optimizer` of the measured merges."""
    merges_from: str
    """Command, machine and date of the merges' figures and of the copy."""
    wire_from: str
    """The same of the wire's."""

    def lines(self, rule: str) -> list[str]:
        """Return lines for people: each rate, and where it is from. rule: the run's,
        whose rates are told if it has any of its own."""
        merges = ", ".join(f"{k} {v:.3g}" for k, v in self.merge_core_seconds.items())
        deltas = ", ".join(f"{k} {v:.3g}" for k, v in self.delta_core_seconds.items())
        of_merges = [
            f"merges, core seconds per 1e9 parameters ({self.merge}, {self.outer}, "
            f"route {self.merge_route}): "
            f"{merges}; each delta {deltas}; a copy {_gb(self.copy_bytes_per_s)}"
            f" [{self.merges_from}]",
            *([self.rules[rule].line(rule)] if rule in self.rules else []),
        ]
        return [
            *(of_merges if self.whole_merge_core_seconds is None else []),
            f"wire with TLS, core seconds per GB: {self.upload_core_seconds:.3g} up, "
            f"{self.fetch_core_seconds:.3g} down [{self.wire_from}]",
            f"sealed files, core seconds per GB: {self.write_core_seconds:.3g} to "
            f"write, {self.read_core_seconds:.3g} to read; a digest "
            f"{self.digest_core_seconds:.2g}, SHA-256 {self.sha256_core_seconds:.2g}",
        ]


CONSTANTS = MachineRates(
    merge_core_seconds={"f32": 7.6, "bf16": 6.9, "int8": 7.3, "int4": 10.9},
    delta_core_seconds={"f32": 2.56, "bf16": 1.75, "int8": 1.50, "int4": 1.93},
    rules=RULES_OF_PACKAGE["xla"],
    replay_core_seconds={"f32": 5.7, "int8": 5.7},
    merge_route="xla",
    read_core_seconds=1.6,
    digest_core_seconds=0.054,
    sha256_core_seconds=0.65,
    upload_core_seconds=0.81,
    fetch_core_seconds=0.84,
    write_core_seconds=0.6,
    copy_bytes_per_s=8.4e9,
    merge="rda",
    outer="nesterov",
    merges_from="constant: `python benchmarks/merging.py`, 2 cores, Intel Xeon, "
    "2026-11-26",
    draw_core_seconds=22.0,
    wire_from="constant: `python benchmarks/wire.py`, 2 cores, AMD EPYC, 2026-11-29",
)
"""Merges: the line through 2 to 16 deltas of docs/results/raw/merging_xeon.json, by the
route that needs no compiler; it is within 3 % of each. On two cores of an AMD EPYC
(docs/results/raw/merging.md) merges take 0.4 to 0.7 of it. The Xeon's rates
are taken: the machines of `MACHINES` have Xeons, a store of 1 B parameters took there
what these say (docs/results/plan.md), and of two measurements the slower one promises
less. Replay: the most of that page, about. Wire: the coordinator's end in
docs/results/raw/wire.md. Sealed files: written, 16 of 64 MiB in turn, on the Xeon,
2026-11-26; read, `restore --parameters 100000000`, two cores of an AMD EPYC
beside other work, 2026-11-30, most of it the kernel's for new pages. Digests:
docs/results/raw/checksums.md. Draw: `init` of the preset 100m, the second time, on the
EPYC beside other work, 2026-11-30."""

NATIVE = msgspec.structs.replace(
    CONSTANTS,
    merge_core_seconds={"f32": 2.1, "bf16": 2.0, "int8": 2.2, "int4": 2.5},
    delta_core_seconds={"f32": 0.90, "bf16": 0.64, "int8": 0.50, "int4": 0.52},
    replay_core_seconds={"f32": 5.7, "int8": 1.1},
    rules=RULES_OF_PACKAGE["native"],
    merge_route="native",
)
"""The same by the route "native", through 2 to 64 deltas: within 6 % of each. Replay of
int8: with the read files above; nobody measured other codecs by this route."""


def constants_of(route: MergeRoute) -> MachineRates:
    """Return the constants for a merge route. "auto" counts as "xla": a plan does not
    know whether the coordinator's machine will have a compiler."""
    return NATIVE if route == "native" else CONSTANTS


def rate_of(rates: dict[str, float], codec: str) -> float:
    """Return the rate of a codec; of the slowest if this one was not measured."""
    return rates.get(codec, max(rates.values()))


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


# ---- measured values ----------------------------------------------------------------


class MeasuredValue(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """One measured value."""

    value: float
    origin: str
    """Command or run, machine and date."""


OneValue = MeasuredValue | None
ByName = dict[str, MeasuredValue]


class Measurements(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """All that can be measured for a plan; each value is left out where nobody did."""

    step_seconds: ByName = {}
    """Median seconds of a step, by island."""
    share_of_peak: ByName = {}
    """Share of the chips' peak that the model's FLOPs reached, by generation. An
    island's own `step_seconds` count before it."""
    device_memory_bytes: ByName = {}
    """Bytes of a device's memory that programs may have, by island."""
    link_up_gbit_per_s: OneValue = None
    """Gbit/s of the slowest island's link to the coordinator."""
    link_down_gbit_per_s: OneValue = None
    """The same from the coordinator."""
    disk_write_bytes_per_s: OneValue = None
    """Bytes per second that the coordinator's disk writes."""
    disk_read_bytes_per_s: OneValue = None
    """Bytes per second that it reads."""
    merge_core_seconds: OneValue = None
    """Core seconds of the coordinator per 1e9 parameters of a merge: of as many deltas
    as the run has islands, by its rule and codecs, with the checks of the deltas."""
    restart_seconds: OneValue = None
    """Seconds from the death of the coordinator's process to its service, in place of
    `PROCESS_S`: most of the state is read after that."""
    compile_seconds: OneValue = None
    """Seconds in which a host of the slowest island compiles all of its programs."""

    def values(self) -> Iterator[tuple[str, MeasuredValue]]:
        """Yield each value with its name: "step_seconds.v5p", "restart_seconds"."""
        for name in self.__struct_fields__:
            found = getattr(self, name)
            if isinstance(found, dict):
                yield from ((f"{name}.{key}", value) for key, value in found.items())
            elif found is not None:
                yield name, found

    def marked(self, remark: str) -> Measurements:
        """Return the same values with a remark at the end of each origin."""

        def one(found: Any) -> Any:
            if isinstance(found, dict):
                return {key: one(value) for key, value in found.items()}
            return msgspec.structs.replace(found, origin=f"{found.origin}{remark}")

        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return Measurements(**{n: one(found) for n, found in given.items() if found})

    def lines(self) -> Iterator[str]:
        """Yield a line for people for each value, and where it is from."""
        for name, found in self.values():
            yield f"measured {name}: {found.value:.4g} [{found.origin}]"


NOTHING_MEASURED = Measurements()


def read_measurements(path: str, config: Config) -> Measurements:
    """Read a file of measured values, `diloco plan --measured FILE`.

    Raises ConfigError naming the file and the field: one that the file may not have, an
    island that the run does not have, or a value that nothing can measure.
    """
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Measurements)
    except OSError as error:
        raise ConfigError(
            f"--measured {path}: {error.strerror}; name a file"
        ) from error
    except msgspec.DecodeError as error:
        fields = ", ".join(Measurements.__struct_fields__)
        raise ConfigError(
            f'--measured {path}: {error}; write {{"FIELD": {{"value": NUMBER, '
            f'"origin": TEXT}}}}, with a level of names between for step_seconds '
            f"and device_memory_bytes (islands) and share_of_peak (generations); "
            f"fields are {fields}"
        ) from error
    for said in _wrong(found, config):
        raise ConfigError(f"--measured {path}: {said}")
    return found


def _wrong(found: Measurements, config: Config) -> Iterator[str]:
    """Yield what no run can have measured, with its remedy."""
    named = (
        ("step_seconds", config.islands),
        ("share_of_peak", GENERATIONS),
        ("device_memory_bytes", config.islands),
    )
    for field, known in named:
        for name in getattr(found, field):
            if name not in known:
                near = suggest(name, list(known))
                yield f"{field} has {name!r}{near}; choose from {', '.join(known)}"
    for name, one in found.values():
        share = name.startswith("share_of_peak")
        if not 0 < one.value <= (1 if share else LARGEST):
            limit = " and at most 1" if share else ""
            yield f"{name} = {one.value:g}; it must be finite and above 0{limit}"
        if not one.origin.strip():
            yield f"{name} has no origin; write the command, the machine and the day"


# ---- the time that a restart takes --------------------------------------------------

STATE_BYTES = 12
"""Bytes per parameter of the state: parameters, anchor and momentum in f32."""
REPLAYED_CYCLES = 6
"""Cycles whose publishes a restart is taken to replay where no plan has counted them.
12 B parameters on a disk of 2 TB: a round of snapshots takes 800 s, cycles of 93 s, and
a fragment's newest snapshot is half a round old on average."""
SOME_MACHINE = "n2-highmem-16"
"""Machine whose disk is taken where the table lacks the config's."""


PROCESS_S = 30.0
"""Seconds of a restart before the state is read: an assumption, for start and imports.
"""
RESTORED_MAX = 1.25
"""Seconds of a restore over those of its disk or its cores, whichever take longer: a
bound of `benchmarks/restore.py`."""


def state_seconds(
    read_bytes: float,
    bytes_per_s: float,
    replayed_parameters: float,
    replay_core_seconds: float,
    read_core_seconds: float,
    cores: int,
) -> float:
    """Return the seconds in which a starting process restores its state. It reads some
    fragments while it decodes others, and serves each once it is back.

    Args:
      read_bytes: of the newest snapshots and the publishes after them, each read once.
      bytes_per_s: of the disk.
      replayed_parameters: those of these publishes, once for each publish.
      replay_core_seconds: core seconds per 1e9 of them.
      read_core_seconds: core seconds per GB that is read.
      cores: of the machine.
    """
    computed = (
        replayed_parameters * replay_core_seconds + read_bytes * read_core_seconds
    )
    return RESTORED_MAX * max(read_bytes / bytes_per_s, computed / 1e9 / cores)


def outage_seconds(config: Config, parameters: int) -> float:
    """Return the seconds that islands last on the data they hold: as long as the state
    takes to be restored, and at least `placement.outage_budget_s`."""
    name = config.launch.coordinator_machine
    machine = machine_of(name if name in MACHINES else SOME_MACHINE)
    rates = constants_of(config.placement.merge_route)
    replayed = REPLAYED_CYCLES * parameters
    by_size = disk_bytes_per_s(config.launch.coordinator_disk_gb)
    restored_s = state_seconds(
        # A publish has a byte per parameter, in int8.
        STATE_BYTES * parameters + replayed,
        min(by_size, machine.disk_bytes_per_s),
        replayed,
        rate_of(rates.replay_core_seconds, config.run.sync.codec_down),
        rates.read_core_seconds,
        machine.cores,
    )
    # The budget that is set has room for a start, and for the state of a small model.
    restart_s = restored_s + min(restored_s, PROCESS_S)
    return max(config.placement.outage_budget_s, restart_s)


def lasting(config: Config, parameters: int) -> Config:
    """Return the config with an outage budget that lasts through a restart. All
    processes of a run call it, and leases and waits follow from its result."""
    outage_s = outage_seconds(config, parameters)
    placement = dataclasses.replace(config.placement, outage_budget_s=outage_s)
    return dataclasses.replace(config, placement=placement)
