"""Refusals: what the run needs against what it has, and the smallest change that helps.

Everything here is arithmetic from the config, the sizes of fragments and the islands'
steps, so a change is tried by doing the arithmetic again. A change that would break
another check is not proposed. A need that only makes somebody wait his turn is told,
and refuses nothing.

Every byte crosses an island's link once, however many hosts and copies of the model it
has: its hosts fetch disjoint parts, and the slice's own interconnect spreads them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from diloco_jax.config import IslandConfig
from diloco_jax.coordinator.settings import admitted, payload_bytes, room_needed
from diloco_jax.hardware.machines import MIB, MOST_DISK_GB, smallest_machine
from diloco_jax.hardware.tpus import Slice, find_slice, slice_of
from diloco_jax.island.region import KEPT
from diloco_jax.planning.compiling import least_hbm
from diloco_jax.planning.coordinator import (
    CoordinatorPlan,
    OutagePlan,
    plan_coordinator,
    plan_outage,
)
from diloco_jax.planning.terms import Change, Terms, shown
from diloco_jax.wire.peers import MOST_SLOTS

LINK_UTILISATION = 0.99
"""Share of the time for which links carry payload (`diloco simulate bandwidth`)."""
MOST_MEMORY = 0.95
"""Share of a machine's memory that may be planned for."""
MOST_DISK = 0.9
"""Share of a disk's bytes, and of its rate, that may be planned for."""
DISK_EGRESS = 1.16
"""Bytes that a machine sends for each byte that it writes to a persistent disk
(cloud.google.com/compute/docs/disks/optimizing-pd-performance, 2026-11-24)."""
GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Gbit/s in one direction."""

    mean: float
    """Mean rate over a cycle of the run."""
    peak: float
    """Rate while the largest fragment is under way; each direction has half of the
    overlap window.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandNetwork:
    """Rates of one island's link."""

    up: Rates
    down: Rates
    join_seconds: float
    """Seconds in which the link carries all anchors in f32."""
    kept_bytes: int
    """Bytes of publishes that each host keeps for others of its region, at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Needs of the coordinator and of each link."""

    coordinator: CoordinatorPlan
    outage: OutagePlan
    networks: dict[str, IslandNetwork]
    together_seconds: float
    """Seconds in which all islands join at once: of the slowest link, or of what the
    machine that serves most sends."""


def needs_of(terms: Terms) -> Needs:
    """Do the arithmetic. Raises ConfigError."""
    sync, plan, cycle_s = terms.run.sync, terms.fragments, terms.cycle_seconds
    coordinator = plan_coordinator(terms)
    up = payload_bytes(sync.codec_up, plan, up=True)
    down, regions = payload_bytes(sync.codec_down, plan), terms.config.regions()

    def rates_of(sizes: list[int], own_seconds: float) -> Rates:
        mean = _gbit(sum(sizes)) / cycle_s
        # Without overlap an island waits; a window of one step is a fair share.
        window = max(1, sync.overlap) * own_seconds / 2
        return Rates(mean=mean, peak=max(mean, _gbit(max(sizes)) / window))

    join, count = _gbit(4 * plan.total), len(terms.step_seconds)
    egress = terms.machine.egress_gbit_per_s or math.inf
    slowest = max(1 / terms.link_down, count * coordinator.share_served / egress)
    return Needs(
        coordinator=coordinator,
        outage=plan_outage(terms, coordinator),
        networks={
            name: IslandNetwork(
                up=rates_of(up, seconds),
                down=rates_of(down, seconds),
                join_seconds=join / terms.link_down,
                kept_bytes=(name in regions)
                * KEPT
                * -(-max(down) // terms.hosts[name]),
            )
            for name, seconds in terms.step_seconds.items()
        },
        together_seconds=join * slowest,
    )


def _gbit(octets: int) -> float:
    """Return the gigabits that a link must be able to carry for a payload."""
    return 8e-9 * octets / LINK_UTILISATION


class Check(NamedTuple):
    """One need, and what there is for it."""

    name: str
    needed: float
    available: float
    text: str
    """Sentence without the remedy."""
    changes: Iterable[Change]
    """Changes that may help, the smallest first."""
    waits: bool = False
    """True if what is beyond waits its turn, and so nothing is refused."""

    @property
    def holds(self) -> bool:
        """True if there is enough."""
        return self.needed <= self.available


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """The change that mends a check which does not hold, or makes a plan better."""

    check: str
    text: str
    """Sentence with the need, what there is, and the change."""
    change: Change
    """Values by field with which the check holds, or the plan is better; empty if none
    is known.
    """


def refusals(terms: Terms) -> list[Remedy]:
    """Return what would not run, each with the smallest change that would.

    Raises ConfigError.
    """
    wrong, found = failing(terms), []
    for name, check in wrong.items():
        change, said = Change(), "; no single setting that this plan knows is enough"
        for one in check.changes:
            after = set(failing(terms.changed(one)))
            if name not in after and after <= set(wrong):
                change, said = one, f": set {shown(one)}"
                break
        text = f"{check.text}{said}"
        found.append(Remedy(check=name, text=text, change=change))
    return found


def failing(terms: Terms) -> dict[str, Check]:
    """Return the checks that refuse, by name."""
    return {
        check.name: check
        for check in _checks(terms)
        if not (check.holds or check.waits)
    }


def notes(terms: Terms) -> list[str]:
    """Return what refuses nothing, as sentences: what makes somebody wait his turn, and
    slices whose steps are slowed down as emulated ones are."""
    waits = [c.text for c in _checks(terms) if c.waits and not c.holds]
    slowed = [
        f"islands.{name}.step_seconds = {island.step_seconds:g}"
        for name, island in terms.config.islands.items()
        if island.topology and island.step_seconds
    ]
    if slowed:
        waits.append(
            f"{', '.join(slowed)}: steps take at least that, on a slice, too; set 0 "
            f"for all but an emulation"
        )
    return waits


def _checks(terms: Terms) -> list[Check]:
    needs = needs_of(terms)
    return [
        *_hbm(terms),
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


def least_hbm_of(terms: Terms) -> dict[str, tuple[int, float]]:
    """Return by island the bytes that each device holds at least, and what it has;
    empty where a compiler has told more, or the model is of the user's own.

    Raises ConfigError.
    """
    if terms.hbm_known or terms.run.model.factory:
        return {}
    found, measured = {}, terms.measured.device_memory_bytes
    alike = dict[IslandConfig, int]()
    for name, island in terms.config.islands.items():
        if not island.topology:
            continue
        has: float = slice_of(name, island).hbm_bytes
        if name in measured:
            has = measured[name].value
        if island not in alike:
            alike[island] = least_hbm(terms.config, name, terms.fragments).resting
        found[name] = (alike[island], has)
    return found


def _hbm(terms: Terms) -> Iterator[Check]:
    found = least_hbm_of(terms)
    if not found:
        return
    name = max(found, key=lambda name: found[name][0] / found[name][1])
    (needed, has), island = found[name], terms.config.islands[name]
    yield Check(
        "HBM",
        needed,
        has,
        f"islands.{name}: parameters, the inner optimizer's state and what the "
        f"exchange holds take {needed / GB:.3g} GB of each device's HBM, without "
        f"gradients and activations, and {island.topology} has {has / GB:.3g} GB "
        f"(mesh_fsdp = {island.mesh_fsdp}, anchor_memory = {island.anchor_memory!r})",
        _roomier(terms, found),
    )


def _roomier(terms: Terms, found: dict[str, tuple[int, float]]) -> Iterator[Change]:
    """Propose for all islands that lack HBM together what is the least for each."""
    together, tried = Change(), dict[IslandConfig, dict[str, Any]]()
    for name, (needed, has) in found.items():
        island = terms.config.islands[name]
        if needed <= has:
            continue
        if island not in tried:
            for fields in _less_hbm(island):
                then = terms.changed(
                    {f"islands.{name}.{f}": v for f, v in fields.items()}
                )
                least, most = least_hbm_of(then)[name]
                if least <= most:
                    tried[island] = fields
                    break
            else:
                return
        together |= {f"islands.{name}.{f}": v for f, v in tried[island].items()}
    yield together


def _less_hbm(island: IslandConfig) -> Iterator[dict[str, Any]]:
    """Yield fields with which a device holds less: parameters cut over all devices that
    have copies, anchors in host memory, larger slices of the same chips."""
    cut: dict[str, Any] = {}
    if island.mesh_data > 1:
        cut = {"mesh_data": 1, "mesh_fsdp": island.mesh_data * island.mesh_fsdp}
        yield cut
    if island.anchor_memory == "device":
        yield {"anchor_memory": "pinned_host"}
        if cut:
            yield cut | {"anchor_memory": "pinned_host"}
    now = find_slice(island.topology, "topology")
    for shape in now.generation.shapes:
        larger = Slice(now.generation, shape)
        times, rest = divmod(larger.devices, island.devices)
        if times < 2 or rest:
            continue
        fields: dict[str, Any] = {
            "topology": larger.topology,
            "mesh_data": 1,
            "mesh_fsdp": times * island.mesh_data * island.mesh_fsdp,
        }
        # A batch of whole rows for each device; mostly it is one already.
        each = times * island.batch_multiple
        fields["batch_size"] = each * -(-island.batch_size // each)
        yield {f: v for f, v in fields.items() if v != getattr(island, f)}


def _link(terms: Terms, needs: Needs) -> Check:
    needed, has, name = busiest_link(terms, needs, lambda rates: rates.mean)
    steps = _steps(terms)
    return Check(
        "link",
        needed,
        has,
        f"islands.{name}: its link must carry {needed:.3g} Gbit/s on average and has "
        f"{has:g} (sync.steps_per_cycle = {steps})",
        _longer(terms, needed / has),
    )


def busiest_link(
    terms: Terms, needs: Needs, rate_of: Callable[[Rates], float]
) -> tuple[float, float, str]:
    """Return the rate of the link that has the least to spare, what it has, and its
    island: of those that are alike, the first."""
    ways = (
        (rate_of(rates), has, name)
        for name, link in needs.networks.items()
        for rates, has in ((link.up, terms.link_up), (link.down, terms.link_down))
    )
    return max(ways, key=lambda way: way[0] / way[1])


def _egress(terms: Terms, needs: Needs) -> Check:
    """Count what the coordinator sends: publishes once to each region, and its disk."""
    machine, plan = terms.machine, needs.coordinator
    asks = terms.asks
    fetched = plan.share_served * sum(needs.networks[n].down.mean for n in asks)
    regions = len({*terms.config.regions().values()})
    inside = f" in {regions} regions and {len(asks) - regions} alone" * bool(regions)
    written = max(disk.bytes_per_s for disk in plan.disks)
    needed = fetched + 8e-9 * DISK_EGRESS * written
    has = machine.egress_gbit_per_s or math.inf
    return Check(
        "egress",
        needed,
        has,
        f"the coordinator sends {needed:.3g} Gbit/s on average{plan.for_machine}, "
        f"{fetched:.3g} of it to {len(needs.networks)} islands{inside} and the rest to "
        f"its disk, and {machine.name} sends {has:g} at most",
        [
            *_machines(needs, egress_gbit_per_s=needed),
            # Only the rounds of snapshots do not get longer with the cycle.
            *(
                {"sync.steps_per_cycle": math.ceil(_steps(terms) * needed / has * more)}
                for more in range(1, 5)
            ),
        ],
    )


def _join(terms: Terms, needs: Needs) -> Check:
    placement, octets = terms.placement, 4 * terms.fragments.total
    needed, count = needs.together_seconds, len(needs.networks)
    has, pin_s = placement.deadlines.join_s(octets), placement.deadlines.pin_s
    budget = math.ceil(placement.time_budget_s * (1 + (needed - has) / pin_s))
    return Check(
        "join",
        needed,
        has,
        f"a join of {octets / GB:.0f} GB takes {needed:.0f} s as {count} islands "
        f"begin, by links of {terms.link_down:g} Gbit/s and by what the coordinator "
        f"sends, and hosts wait for it for {has:.0f} s "
        f"(placement.time_budget_s = {placement.time_budget_s:g})",
        [{"placement.time_budget_s": float(budget)}],
    )


def _memory(terms: Terms, needs: Needs) -> Check:
    machine, needed = terms.machine, needs.coordinator.machine_memory
    return Check(
        "memory",
        needed,
        MOST_MEMORY * machine.memory,
        f"the coordinator needs {needed / GB:.0f} GB of memory"
        f"{needs.coordinator.for_whom} and {machine.name} has "
        f"{machine.memory / GB:.0f}, of which {MOST_MEMORY:.0%} may be used",
        _machines(needs),
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
        [{"placement.merge_buffer_bytes": needed}],
    )


def _cores(terms: Terms, needs: Needs) -> Check:
    machine, needed = terms.machine, needs.coordinator.machine_cores
    return Check(
        "cores",
        needed,
        machine.cores,
        f"the coordinator needs {needed} cores{needs.coordinator.for_whom} and "
        f"{machine.name} has {machine.cores}",
        _machines(needs),
    )


def _merging(terms: Terms, needs: Needs) -> Check:
    """Count what one process can do in a cycle: more cores than its merges keep busy
    are of no use to it."""
    merges, workers = needs.coordinator.merges, terms.placement.workers
    took, summed = merges.seconds, merges.seconds_of_weighted_sum
    less = f"; a weighted sum such as rda takes {summed:.3g} s" * (summed < took)
    each = f" in the largest of {workers} workers" * (workers > 1)

    def changes() -> Iterator[Change]:
        yield {"placement.merge_route": "native"}
        # None of more workers has more cores than one has now.
        least = max(workers + 1, math.ceil(workers * merges.share))
        most = len(terms.fragments.fragments)
        more: list[Change] = [
            {"placement.workers": count} for count in range(least, most + 1)
        ]
        yield from more
        yield from _machines(needs)
        for change in more:
            for machine in _machines(needs_of(terms.changed(change))):
                yield change | machine
        yield from _longer(terms, merges.share)

    return Check(
        "merging",
        took,
        terms.cycle_seconds,
        f"merges of a cycle take {took:.3g} s on {merges.cores:g} cores{each} and a "
        f"cycle {terms.cycle_seconds:.3g} s, with {merges.deltas} deltas, sync.merge = "
        f"{merges.rule!r}, sync.steps_per_cycle = {_steps(terms)} and the merge route "
        f"{terms.rates.merge_route!r}{less}",
        changes(),
    )


def _disk_bytes(terms: Terms, needs: Needs) -> Check:
    has, plan = terms.config.launch.coordinator_disk_gb, needs.coordinator
    if terms.steps_known:
        disk = max(plan.disks, key=lambda disk: disk.bytes)
        needed, held = disk.bytes, disk.expected
    else:
        disk = max(plan.disks, key=lambda disk: disk.least)
        needed, held = disk.least, disk.least - disk.deltas - disk.spared
    enough = terms.placement.merge_buffer_bytes + plan.disk.deltas
    left = MOST_MEMORY * terms.machine.memory - (plan.memory - plan.merge_buffer)
    in_memory: list[Change] = [{"placement.merge_buffer_bytes": enough}]
    return Check(
        "disk bytes",
        needed,
        MOST_DISK * has * GB,
        f"the coordinator is expected to hold {held / GB:.0f} GB on its disk"
        f"{plan.for_machine}, must have room for {(needed - held) / GB:.0f} more, and "
        f"has a disk of {has} GB, of which {MOST_DISK:.0%} may be used",
        [*(in_memory if disk.deltas and enough <= left else ()), *_sizes(terms)],
    )


def _disk_speed(terms: Terms, needs: Needs) -> Check:
    disk = max(needs.coordinator.disks, key=lambda disk: disk.bytes_per_s)
    rate = terms.disk_bytes_per_s
    size, has = terms.config.launch.coordinator_disk_gb, MOST_DISK * rate
    left, rarer = has - disk.log_bytes_per_s, list[Change]()
    if left > 0 and not disk.in_bucket:
        every = math.ceil(disk.round_seconds * disk.snapshot_bytes_per_s / left)
        rarer = [{"placement.snapshot_every_s": float(every)}]
    asked = disk.bytes_per_s / MOST_DISK / MIB
    return Check(
        "disk speed",
        disk.bytes_per_s,
        has,
        f"log and snapshots write {disk.bytes_per_s / 1e6:.0f} MB/s to a disk of "
        f"{size} GB, which takes {rate / 1e6:.0f}, of which {MOST_DISK:.0%} may be "
        f"used (a round of snapshots in {disk.round_seconds:.0f} s)",
        [*rarer, *_sizes(terms), *_machines(needs, disk_mib_per_s=asked)],
    )


def _restart(terms: Terms, needs: Needs) -> Check:
    takes, has = math.ceil(needs.outage.restart_seconds), needs.outage.held_seconds
    return Check(
        "restart",
        needs.outage.restart_seconds,
        has,
        f"a restart of the coordinator takes {takes} s and islands have data for "
        f"{math.floor(has)} (placement.outage_budget_s = "
        f"{terms.placement.outage_budget_s:g}, and more by the size of the "
        f"state)",
        [{"placement.outage_budget_s": float(takes)}],
    )


def _places(terms: Terms) -> Check:
    """Count the transfers that may run at once at a port, and each worker has its own:
    one per host and channel, each way."""
    placement, hosts = terms.placement, sum(terms.hosts.values())
    channels, workers = placement.bulk_channels, placement.workers
    needed = 2 * channels * hosts
    where = f"the port of each of {workers} workers" if workers > 1 else "its port"
    return Check(
        "places",
        needed,
        MOST_SLOTS,
        f"{hosts} hosts with placement.bulk_channels = {channels} may begin {needed} "
        f"transfers together at {where}, which has places for {MOST_SLOTS}: others "
        f"wait their turn",
        (),
        waits=True,
    )


def _steps(terms: Terms) -> int:
    return terms.run.sync.cycle


def _longer(terms: Terms, factor: float) -> Iterator[Change]:
    """Propose cycles that are longer by a factor."""
    cycle = math.ceil(_steps(terms) * factor)
    yield {"sync.steps_per_cycle": cycle}
    yield {"sync.steps_per_cycle": cycle + 1}


def _machines(
    needs: Needs, *, egress_gbit_per_s: float = 0.0, disk_mib_per_s: float = 0.0
) -> Iterator[Change]:
    memory = needs.coordinator.machine_memory / MOST_MEMORY
    cores = needs.coordinator.machine_cores
    machine = smallest_machine(memory, cores, egress_gbit_per_s, disk_mib_per_s)
    if machine:
        yield {"launch.coordinator_machine": machine.name}


def _sizes(terms: Terms) -> Iterator[Change]:
    """Propose larger disks, each by a tenth. They are faster, too."""
    size = terms.config.launch.coordinator_disk_gb
    while size < MOST_DISK_GB:
        size = min(MOST_DISK_GB, math.ceil(size * 1.1 / 100) * 100)
        yield {"launch.coordinator_disk_gb": size}
