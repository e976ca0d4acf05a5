"""Refusals: what the run needs against what it has, and the smallest change that helps.

Everything here is arithmetic from the config, the sizes of fragments and the islands'
steps, so a change is tried by doing the arithmetic again. A change that would break
another check is not proposed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from diloco_jax.coordinator.settings import admitted, room_needed
from diloco_jax.hardware.machines import (
    MIB,
    MOST_DISK_GB,
    machine_of,
    smallest_machine,
)
from diloco_jax.planning.changes import shown
from diloco_jax.planning.terms import Needs, Terms, changed, needs_of
from diloco_jax.restart_time import outage_seconds
from diloco_jax.wire.acceptor import MOST_PLACES

MOST_MEMORY = 0.95
"""Share of a machine's memory that may be planned for."""
MOST_DISK = 0.9
"""Share of a disk's bytes, and of its rate, that may be planned for."""
DISK_EGRESS = 1.16
"""Bytes that a machine sends for each byte that it writes to a persistent disk
(cloud.google.com/compute/docs/disks/optimizing-pd-performance, 2026-11-24)."""
GB = 1e9
MOST_CHANGES = 16
"""Changes that are tried one after the other before a plan knows no set of them."""


class Check(NamedTuple):
    """One need, and what there is for it."""

    name: str
    needed: float
    available: float
    text: str
    """Sentence without the remedy."""
    changes: Callable[[], Iterator[dict[str, Any]]]
    """Changes that may help, the smallest first: values by field."""

    @property
    def holds(self) -> bool:
        """True if there is enough."""
        return self.needed <= self.available


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A check that does not hold."""

    check: str
    text: str
    """Sentence with the need, what there is, and the change."""
    change: dict[str, Any]
    """Values by field, with which all of the plan's checks of this kind hold; empty if
    no single field does it.
    """


def refusals(terms: Terms) -> list[Shortfall]:
    """Return what would not run, each with the smallest change that would.

    Raises ConfigError.
    """
    failing = {c.name for c in _checks(terms) if not c.holds}
    return [_refusal(terms, c, failing) for c in _checks(terms) if not c.holds]


def _refusal(terms: Terms, check: Check, failing: set[str]) -> Shortfall:
    for change in check.changes():
        after = {c.name for c in _checks(changed(terms, change)) if not c.holds}
        if check.name not in after and after <= failing:
            said = f"{check.text}: set {shown(change)}"
            return Shortfall(check=check.name, text=said, change=change)
    text = f"{check.text}; no single setting that this plan knows is enough"
    return Shortfall(check=check.name, text=text, change={})


def mending(terms: Terms) -> dict[str, Any]:
    """Return one set of changes with which no check refuses; empty if none is known.

    It is found change by change, each planned with those before it: what mends one
    check may ask more of another. Raises ConfigError."""
    found: dict[str, Any] = {}
    for _ in range(MOST_CHANGES):
        after = changed(terms, found)
        failing = [check for check in _checks(after) if not check.holds]
        if not failing:
            break
        tried = ((c.name, change) for c in failing for change in c.changes())
        change = next((change for n, change in tried if _mends(after, n, change)), None)
        if change is None:
            return {}
        found |= change
    else:
        return {}
    for field in list(found):
        fewer = {name: value for name, value in found.items() if name != field}
        if all(check.holds for check in _checks(changed(terms, fewer))):
            found = fewer
    return found


def _mends(terms: Terms, name: str, change: dict[str, Any]) -> bool:
    """Tell whether a check holds after a change."""
    return all(c.holds for c in _checks(changed(terms, change)) if c.name == name)


def _checks(terms: Terms) -> list[Check]:
    needs = needs_of(terms)
    return [
        _link(terms, needs),
        _egress(terms, needs),
        _join(terms, needs),
        _memory(terms, needs),
        _buffer(terms),
        _cores(terms, needs),
        _merging(terms, needs),
        _disk_bytes(terms, needs),
        _disk_speed(terms, needs),
        _restart(terms, needs),
        _places(terms),
    ]


def _link(terms: Terms, needs: Needs) -> Check:
    means = {n: max(i.up.mean, i.down.mean) for n, i in needs.networks.items()}
    name = max(means, key=lambda name: means[name])
    needed = means[name]
    has, sync = terms.link_gbit_per_s, terms.config.run.sync

    def changes() -> Iterator[dict[str, Any]]:
        cycle = math.ceil(sync.steps_per_cycle * needed / has)
        yield {"sync.steps_per_cycle": cycle}
        yield {"sync.steps_per_cycle": cycle + 1}

    return Check(
        "link",
        needed,
        has,
        f"islands.{name}: its link must carry {needed:.3g} Gbit/s on average and has "
        f"{has:g} (sync.steps_per_cycle = {sync.steps_per_cycle})",
        changes,
    )


def _egress(terms: Terms, needs: Needs) -> Check:
    """Count what the coordinator sends: publishes to all islands, and to its disk."""
    sync = terms.config.run.sync
    machine = machine_of(terms.config.launch.coordinator_machine)
    plan = needs.coordinator
    fetched = plan.share_served * sum(n.down.mean for n in needs.networks.values())
    needed = fetched + 8e-9 * DISK_EGRESS * plan.busiest_disk.bytes_per_s
    has = machine.egress_gbit_per_s or math.inf

    def changes() -> Iterator[dict[str, Any]]:
        yield from _machines(needs, egress_gbit_per_s=needed)
        # Only the rounds of snapshots do not get longer with the cycle.
        for cycle in range(1, 5):
            longer = math.ceil(sync.steps_per_cycle * needed / has * cycle)
            yield {"sync.steps_per_cycle": longer}

    return Check(
        "egress",
        needed,
        has,
        f"the coordinator sends {needed:.3g} Gbit/s on average{plan.for_machine}, "
        f"{fetched:.3g} of it to {len(needs.networks)} islands and the rest to its "
        f"disk, and {machine.name} sends {has:g} at most",
        changes,
    )


def _join(terms: Terms, needs: Needs) -> Check:
    placement = terms.config.placement
    needed = max(network.join_seconds for network in needs.networks.values())
    octets = 4 * terms.fragments.total
    has = placement.deadlines.join_s(octets)

    def changes() -> Iterator[dict[str, Any]]:
        missing = (needed - has) / placement.deadlines.pin_s
        budget = math.ceil(placement.time_budget_s * (1 + missing))
        yield {"placement.time_budget_s": float(budget)}

    return Check(
        "join",
        needed,
        has,
        f"a join of {octets / GB:.0f} GB takes {needed:.0f} s on a link of "
        f"{terms.link_gbit_per_s:g} Gbit/s, and hosts wait for it for {has:.0f} s "
        f"(placement.time_budget_s = {placement.time_budget_s:g})",
        changes,
    )


def _memory(terms: Terms, needs: Needs) -> Check:
    machine = machine_of(terms.config.launch.coordinator_machine)
    needed = needs.coordinator.machine_memory
    return Check(
        "memory",
        needed,
        MOST_MEMORY * machine.memory,
        f"the coordinator needs {needed / GB:.0f} GB of memory"
        f"{needs.coordinator.for_whom} and {machine.name} has "
        f"{machine.memory / GB:.0f}, of which {MOST_MEMORY:.0%} may be used",
        lambda: _machines_or_fewer_workers(needs, machine.cores),
    )


def _buffer(terms: Terms) -> Check:
    """The coordinator does not begin with less (`coordinator/settings.py`)."""
    config, needed = terms.config, room_needed(terms.config, terms.fragments)
    has, workers = config.placement.merge_buffer_bytes, config.placement.workers
    each = f" in each of {workers} workers" * (workers > 1)
    return Check(
        "merge buffer",
        needed,
        has,
        f"deltas of the largest fragment from {len(admitted(config))} islands take "
        f"{needed / workers / GB:.3g} GB{each} and placement.merge_buffer_bytes is "
        f"{has / GB:.3g} GB",
        lambda: iter(({"placement.merge_buffer_bytes": needed},)),
    )


def _cores(terms: Terms, needs: Needs) -> Check:
    machine = machine_of(terms.config.launch.coordinator_machine)
    return Check(
        "cores",
        needs.coordinator.machine_cores,
        machine.cores,
        f"the coordinator needs {needs.coordinator.machine_cores} cores"
        f"{needs.coordinator.for_whom} and {machine.name} has {machine.cores}",
        lambda: _machines_or_fewer_workers(needs, machine.cores),
    )


def _merging(terms: Terms, needs: Needs) -> Check:
    """Count what one process can do in a cycle: more cores than its merges keep busy
    are of no use to it."""
    merges, sync = needs.coordinator.merges, terms.config.run.sync
    cost, placement = merges.cost, terms.config.placement
    took, summed = merges.seconds, merges.seconds_of_weighted_sum
    less = f"; a weighted sum such as rda takes {summed:.3g} s" * (summed < took)
    each = f" in the largest of {placement.workers} workers" * (placement.workers > 1)

    def changes() -> Iterator[dict[str, Any]]:
        yield {"placement.merge_route": "native"}
        # None of more workers has more cores than one has now.
        least = max(placement.workers + 1, math.ceil(placement.workers * merges.share))
        most = len(terms.fragments.fragments)
        more = [{"placement.workers": count} for count in range(least, most + 1)]
        yield from more
        yield from _machines(needs)
        for change in more:
            for machine in _machines(needs_of(changed(terms, change))):
                yield change | machine
        cycle = math.ceil(sync.steps_per_cycle * merges.share)
        yield {"sync.steps_per_cycle": cycle}
        yield {"sync.steps_per_cycle": cycle + 1}

    return Check(
        "merging",
        took,
        needs.cycle_seconds,
        f"merges of a cycle take {took:.3g} s on {merges.cores:g} cores{each} and a "
        f"cycle {needs.cycle_seconds:.3g} s, with {cost.deltas} deltas, sync.merge = "
        f"{cost.rule!r}, sync.steps_per_cycle = {sync.steps_per_cycle} and the merge "
        f"route {terms.rates.merge_route!r}{less}",
        changes,
    )


def _machines_or_fewer_workers(needs: Needs, cores: int) -> Iterator[dict[str, Any]]:
    yield from _machines(needs)
    workers = len(needs.coordinator.workers)
    most = 0 if needs.coordinator.apart else min(workers, cores)
    yield from ({"placement.workers": fewer} for fewer in range(most - 1, 0, -1))


def _machines(
    needs: Needs, *, egress_gbit_per_s: float = 0.0, disk_mib_per_s: float = 0.0
) -> Iterator[dict[str, Any]]:
    memory = needs.coordinator.machine_memory / MOST_MEMORY
    cores = needs.coordinator.machine_cores
    machine = smallest_machine(memory, cores, egress_gbit_per_s, disk_mib_per_s)
    if machine:
        yield {"launch.coordinator_machine": machine.name}


def _disk_bytes(terms: Terms, needs: Needs) -> Check:
    has, plan = terms.config.launch.coordinator_disk_gb, needs.coordinator
    if terms.steps_known:
        disk = plan.fullest_disk
        needed, held = disk.bytes, disk.expected
    else:
        disk = plan.fullest_disk_at_least
        needed, held = disk.least, disk.least - disk.deltas - disk.spared
    enough = terms.config.placement.merge_buffer_bytes + plan.disk.deltas

    def changes() -> Iterator[dict[str, Any]]:
        machine = machine_of(terms.config.launch.coordinator_machine)
        left = MOST_MEMORY * machine.memory - (plan.memory - plan.merge_buffer)
        if disk.deltas and enough <= left:
            yield {"placement.merge_buffer_bytes": enough}
        yield from _sizes(terms)

    return Check(
        "disk bytes",
        needed,
        MOST_DISK * has * GB,
        f"the coordinator is expected to hold {held / GB:.0f} GB on its disk"
        f"{plan.for_machine}, must have room for {(needed - held) / GB:.0f} more, and "
        f"has a disk of {has} GB, of which {MOST_DISK:.0%} may be used",
        changes,
    )


def _disk_speed(terms: Terms, needs: Needs) -> Check:
    disk = needs.coordinator.busiest_disk
    size, rate = terms.config.launch.coordinator_disk_gb, terms.disk_bytes_per_s
    has = MOST_DISK * rate

    def changes() -> Iterator[dict[str, Any]]:
        left = has - disk.log_bytes_per_s
        if left > 0 and not disk.in_bucket:
            every = disk.round_seconds * disk.snapshot_bytes_per_s / left
            yield {"placement.snapshot_every_s": float(math.ceil(every))}
        yield from _sizes(terms)
        asked = disk.bytes_per_s / MOST_DISK / MIB
        yield from _machines(needs, disk_mib_per_s=asked)

    return Check(
        "disk speed",
        disk.bytes_per_s,
        has,
        f"log and snapshots write {disk.bytes_per_s / 1e6:.0f} MB/s to a disk of "
        f"{size} GB, which takes {rate / 1e6:.0f}, of which {MOST_DISK:.0%} may be "
        f"used (a round of snapshots in {disk.round_seconds:.0f} s)",
        changes,
    )


def _sizes(terms: Terms) -> Iterator[dict[str, Any]]:
    """Propose larger disks, each by a tenth. They are faster, too."""
    size = terms.config.launch.coordinator_disk_gb
    while size < MOST_DISK_GB:
        size = min(MOST_DISK_GB, math.ceil(size * 1.1 / 100) * 100)
        yield {"launch.coordinator_disk_gb": size}


def _restart(terms: Terms, needs: Needs) -> Check:
    has = outage_seconds(terms.config, terms.fragments.total)

    def changes() -> Iterator[dict[str, Any]]:
        yield {"placement.outage_budget_s": float(math.ceil(needs.restart_seconds))}

    return Check(
        "restart",
        needs.restart_seconds,
        has,
        f"a restart of the coordinator takes {math.ceil(needs.restart_seconds)} s and "
        f"islands have data for {math.floor(has)} (placement.outage_budget_s = "
        f"{terms.config.placement.outage_budget_s:g}, and more by the size of the "
        f"state)",
        changes,
    )


def _places(terms: Terms) -> Check:
    """Count the transfers that may run at once: one per host and channel, each way."""
    channels, hosts = terms.config.placement.bulk_channels, sum(terms.hosts.values())
    needed = 2 * channels * hosts

    def changes() -> Iterator[dict[str, Any]]:
        if (most := MOST_PLACES // (2 * hosts)) >= 1:
            yield {"placement.bulk_channels": most}

    return Check(
        "places",
        needed,
        MOST_PLACES,
        f"{hosts} hosts with placement.bulk_channels = {channels} may begin {needed} "
        f"transfers together, and it has places for {MOST_PLACES}; others would wait",
        changes,
    )
