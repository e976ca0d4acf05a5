"""The coordinator's machines and disks: published sizes and rates, as of 2026-11-24.

A vCPU is a hardware thread, and so is each core of the machines on which this package
measures its rates. Each row of the tables names the page that it is from:

- N2, C3: cloud.google.com/compute/docs/general-purpose-machines, tables "N2 standard",
  "N2 high-mem", "C3 highmem": vCPUs, memory, default egress bandwidth. Its "GB" is 2^30
  bytes (cloud.google.com/compute/vm-instance-pricing).
- M3: docs.cloud.google.com/sap/docs/certifications-sap-apps, updated 2026-04-09:
  vCPUs, memory in GiB. It does not give the bandwidth.
- DISK: github.com/GoogleCloudPlatform/gcpdiag at 9f84bc0, gcpdiag/runbook/gce/
  disk_performance_benchmark/{limits_per_gb,n-family,c-family,m-family}.json:
  pd-balanced, write and read throughput in MiB/s; the table on
  cloud.google.com/compute/docs/disks/performance has the same per GiB and at most.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine type."""

    name: str
    cores: int
    memory: int
    """Bytes."""
    egress_gbit_per_s: float | None
    """Highest rate to all peers and its disk together; None if it is not known."""
    disk_mib_per_s: int
    """Highest rate of its pd-balanced disk, whatever the disk's size."""

    @property
    def disk_bytes_per_s(self) -> float:
        """The same in bytes per second."""
        return float(self.disk_mib_per_s * MIB)


def _machine(
    name: str, gib: int, egress: float | None, disk_mib_per_s: int = 1200
) -> Machine:
    return Machine(
        name=name,
        cores=int(name.rpartition("-")[2]),
        memory=gib * GIB,
        egress_gbit_per_s=egress,
        disk_mib_per_s=disk_mib_per_s,
    )


MACHINES = {
    machine.name: machine
    for machine in (
        _machine("n2-standard-2", 8, 10, 240),  # N2; DISK "2-7"
        _machine("n2-standard-4", 16, 10, 240),  # N2; DISK "2-7"
        _machine("n2-standard-8", 32, 16, 800),  # N2; DISK "8-15"
        _machine("n2-standard-16", 64, 32),  # N2; DISK "16-31"
        _machine("n2-standard-32", 128, 32),  # N2; DISK "32-63"
        _machine("n2-standard-48", 192, 32),  # N2; DISK "32-63"
        _machine("n2-standard-64", 256, 32),  # N2; DISK "64 or more"
        _machine("n2-highmem-2", 16, 10, 240),  # N2; DISK "2-7"
        _machine("n2-highmem-4", 32, 10, 240),  # N2; DISK "2-7"
        _machine("n2-highmem-8", 64, 16, 800),  # N2; DISK "8-15"
        _machine("n2-highmem-16", 128, 32),  # N2; DISK "16-31"
        _machine("n2-highmem-32", 256, 32),  # N2; DISK "32-63"
        _machine("n2-highmem-48", 384, 32),  # N2; DISK "32-63"
        _machine("n2-highmem-64", 512, 32),  # N2; DISK "64 or more"
        _machine("n2-highmem-80", 640, 32),  # N2; DISK "64 or more"
        _machine("n2-highmem-96", 768, 32),  # N2; DISK "64 or more"
        _machine("n2-highmem-128", 864, 32),  # N2; the page of M3 says 838; DISK
        _machine("c3-highmem-176", 1408, 100),  # C3; DISK "176"
        _machine("m3-megamem-128", 1952, None),  # M3; DISK "m3-megamem-128"
        _machine("m3-ultramem-128", 3904, None),  # M3; DISK "m3-ultramem-128"
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
