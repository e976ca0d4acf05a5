"""The coordinator's machines: published sizes.

Sources: cloud.google.com/compute/docs/general-purpose-machines and
memory-optimized-machines (vCPUs and memory). A vCPU is a hardware thread, and so was
each core of the machine on which this package measures its rates.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine type."""

    name: str
    cores: int
    memory: int
    """Bytes."""


GB = 10**9
GIB = 1 << 30
MACHINES = {
    name: Machine(name=name, cores=cores, memory=memory * GIB)
    for name, cores, memory in (
        *((f"n2-standard-{n}", n, 4 * n) for n in (2, 4, 8, 16, 32, 48, 64)),
        *((f"n2-highmem-{n}", n, 8 * n) for n in (2, 4, 8, 16, 32, 48, 64, 80, 96)),
        ("n2-highmem-128", 128, 864),
        ("c3-highmem-176", 176, 1408),
        ("m3-megamem-128", 128, 1952),
        ("m3-ultramem-128", 128, 3904),
    )
}
"""Machine types by name, the smallest memory of a family first."""
MOST_DISK_GB = 64_000
"""Size of the largest pd-balanced disk."""


def machine_of(name: str) -> Machine:
    """Return a machine type; ConfigError if the table does not have it."""
    if name not in MACHINES:
        raise ConfigError(
            f"launch.coordinator_machine = {name!r}: its cores and memory are not "
            f"known; choose from {', '.join(MACHINES)}"
        )
    return MACHINES[name]


def smallest_machine(memory: float, cores: int) -> Machine | None:
    """Return the machine with the least memory that has enough; None if none has."""
    enough = [m for m in MACHINES.values() if m.memory >= memory and m.cores >= cores]
    return min(enough, key=lambda m: (m.memory, m.cores), default=None)
