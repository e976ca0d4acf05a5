"""Needs of the coordinator's machine: memory, cores, merges, disk; and its outages.

All of it is arithmetic from sizes of payloads and from measured rates
(`hardware/machines.py`). The disk holds what a run of expected course writes, and has
room for the worst. Each of its terms follows from the code that writes: snapshots of
fragments in turns (`coordinator/snapshots.py`), publishes since the oldest kept one
(`fragment_snapshots.py` of `coordinator/holding/`), lines that are never deleted
(`observability/`), deltas that memory has no place for (`inbox.py` there).

Islands train on while it is away, so no step is lost as long as they hold data. But
they train apart: the loss follows from the share of the run in which nothing is merged
(docs/results/raw/outage.md). Without its disk it gathers the islands' anchors: each
fragment once, and of every other island that offers a ballot about it, by which that
anchor is believed (`protocol/coordinator/anchors.py`). Ballots wait where deltas do.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from diloco_jax.config import RunConfig
from diloco_jax.coordinator.holding import inbox
from diloco_jax.coordinator.holding.fragment_snapshots import SPARED_BYTES
from diloco_jax.coordinator.holding.holder import CORES_PER_MERGE, merges_at_once
from diloco_jax.coordinator.holding.inbox import DELTAS_AT_ONCE
from diloco_jax.coordinator.service import METRICS_EVERY_S
from diloco_jax.coordinator.settings import payload_bytes
from diloco_jax.coordinator.snapshots import BUSY_SHARE
from diloco_jax.core import fragment_merge, merging
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragments import FragmentPlan, PayloadLayout
from diloco_jax.core.tiles import MOST_ELEMENTS
from diloco_jax.files import is_bucket
from diloco_jax.hardware.machines import (
    PROCESS_S,
    outage_seconds,
    rate_of,
    state_seconds,
)
from diloco_jax.planning.terms import Terms
from diloco_jax.protocol.holding import deal

SNAPSHOT_COPIES = 1
"""Fragments that a snapshot holds while merges replace them."""
FETCHES_PER_JOIN = 2
"""Fragments that a joining island pins at a time."""
PROCESS_BYTES = 256 << 20
"""The interpreter and compiled programs: the memory of a coordinator that has hardly
any parameters (244 MB, `python benchmarks/coordinator_memory.py`). Libraries, 150 MB,
do not count: they are mapped files, whose pages the system can take back."""
LINES_PER_MERGE = 1700
"""Bytes of a merge's own lines on tape and in metrics, and of its points of curves."""
LINES_PER_DELTA = 760
"""Bytes on the tape of one island's part in a merge: its take, its adoption, the
contribution, its direction."""
LINES_PER_STEP = 275
"""Bytes on the tape of the tokens of others, of which an island writes once a step."""
LINES_PER_REPORT = 940
"""Bytes in metrics and curves of one report of an island."""
LINES_PER_SOURCE = 120
"""The same for the loss on one source of a mixture."""
LINES_PER_LOAD = 42
"""Bytes on tape and in metrics of an expert's load, in a cycle: by three tensors."""
REPORTS_EVERY_S = max(1.0, METRICS_EVERY_S)
"""Seconds at least between two reports of an island that are written, one a step at
most."""
Owner = Literal["coordinator", "lead", "worker"]
"""A coordinator on one machine, or what of it has a machine of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergePlan:
    """Merges of a cycle, in the process that has the most parameters."""

    rule: str
    """`sync.merge`."""
    deltas: int
    core_seconds: float
    """Core seconds per 1e9 parameters of a merge, with the checks of its deltas."""
    until_durable: float
    """The same of what follows until the merge is durable: the digest of Theta, and the
    publish that is written; SHA-256 of the anchor, too, if it is a worker's."""
    of_weighted_sum: float
    """The part that every rule takes."""
    known: bool
    """False: nobody measured the rule, and it counts as a weighted sum."""
    fragment_core_seconds: float
    """Core seconds of the merge of the largest fragment, until it is durable."""
    cores: float
    """Cores that the merges of a process keep busy at most."""
    seconds: float
    """Seconds in which these cores do the merges of a cycle, until they are durable."""
    share: float
    """The same as a share of the cycle, and so of each tick."""

    @property
    def seconds_of_weighted_sum(self) -> float:
        """The same seconds if the rule were a weighted sum."""
        like = self.of_weighted_sum + self.until_durable
        return self.seconds * like / self.all_core_seconds

    @property
    def all_core_seconds(self) -> float:
        """Core seconds per 1e9 parameters of a merge until it is durable."""
        return self.core_seconds + self.until_durable

    @property
    def line(self) -> str:
        """A line for people."""
        unknown = "; nobody measured this rule, and it counts as a weighted sum"
        return (
            f"merges of {self.deltas} deltas by {self.rule}: {self.core_seconds:.3g} "
            f"core seconds per 1e9 parameters and {self.until_durable:.2g} until the "
            f"publish is durable, {self.fragment_core_seconds:.3g} for the largest "
            f"fragment, {self.share:.2g} of each tick on {self.cores:g} cores"
            f"{'' if self.known else unknown}"
        )


def plan_merges(terms: Terms) -> MergePlan:
    """Return the merges of the process that has the most parameters."""
    sync, rates, plan = terms.run.sync, terms.rates, terms.fragments
    deltas, cores, workers = len(terms.hosts), terms.machine.cores, terms.workers
    summed = rate_of(rates.merge_core_seconds, sync.codec_down)
    summed += deltas * rate_of(rates.delta_core_seconds, sync.codec_up)
    beyond: float | None = 0.0
    rule = MERGE_RULES.find(sync.merge)
    if rule.needs != "sum":
        found = rates.rules.get(sync.merge)
        beyond = found.beyond(deltas) if found else None
    # The other parameters are merged by the weighted mean.
    by_rule = sum(p.size for p in plan.pieces if merging.rule_for(p, rule) is rule)
    core_seconds = summed + by_rule / plan.total * (beyond or 0.0)
    if (whole := rates.whole_merge_core_seconds) is not None:
        summed, core_seconds, beyond = min(summed, whole), whole, 0.0
    usable = min(cores, merges_at_once(cores) * CORES_PER_MERGE)
    encoded = get_codec(sync.codec_down).tile_bytes(MOST_ELEMENTS) / MOST_ELEMENTS
    until_durable = 4 * rates.digest_core_seconds + encoded * rates.write_core_seconds
    # Peers may be asked for anchors of workers, and for publishes by their region: one
    # pass, as for islands that are alike.
    hashed = 4 * (workers > 1) + encoded * (len(terms.asks) < deltas)
    until_durable += hashed * rates.sha256_core_seconds
    most = max(_dealt(plan, workers, plan.sizes))
    seconds = (core_seconds + until_durable) * most / 1e9 / usable
    return MergePlan(
        rule=sync.merge,
        deltas=deltas,
        core_seconds=core_seconds,
        until_durable=until_durable,
        of_weighted_sum=summed,
        known=beyond is not None,
        fragment_core_seconds=(core_seconds + until_durable) * max(plan.sizes) / 1e9,
        cores=usable,
        seconds=seconds,
        share=seconds / terms.cycle_seconds,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """Bytes of the coordinator's disk, or of the lead's or a worker's if each has a
    machine of its own, and bytes per second that are written.

    `expected`: the most that a run should hold while nothing goes wrong. `reserve`: the
    room that it must have besides."""

    snapshots: int
    """All kept snapshots of every fragment, and one that is being written. A lead has
    the first one and the last one of each, at the run's beginning and end."""
    log: int
    """Publishes since each fragment's oldest kept snapshot, on average: half a round
    before the next snapshot."""
    lines: int
    """Tape, metrics and curves of the whole run, in all their files: none is deleted.
    """
    exports: int
    """Kept cycles and one that is being written, with `placement.export_every`."""
    expected: int
    """Sum of the fields above, without snapshots that go to a bucket."""
    late_log: int
    """Publishes of half a round more, when every next snapshot is just due, and of the
    round that is under way."""
    deltas: int
    """Deltas that wait on the disk because the merge buffer is full, at most."""
    spared: int
    """Bytes that publishes and snapshots leave free; many more where deltas wait, which
    leave room for two snapshots of everything."""
    reserve: int
    """Sum of the three fields above."""
    bytes: int
    """Bytes that must have room: `expected` and `reserve`."""
    least: int
    """The part of it that does not depend on the length of a step: a fragment's
    snapshots follow its publishes at once, and no reports are written."""
    log_bytes_per_s: float
    snapshot_bytes_per_s: float
    export_bytes_per_s: float
    round_seconds: float
    """Seconds in which every fragment is written once: `placement.snapshot_every_s`, or
    longer where the disk is slow.
    """
    in_bucket: bool
    """True if snapshots go to a bucket, and count for its rate and not the disk's."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that are written to the disk."""
        snapshots = 0.0 if self.in_bucket else self.snapshot_bytes_per_s
        return self.log_bytes_per_s + self.export_bytes_per_s + snapshots

    @property
    def written_per_s(self) -> float:
        """Bytes per second that are written, to the disk and to a bucket."""
        return (
            self.log_bytes_per_s + self.export_bytes_per_s + self.snapshot_bytes_per_s
        )


def plan_disk(
    terms: Terms, owner: Owner = "coordinator", params: int = 0, fragments: int = 0
) -> DiskPlan:
    """Return the plan of the disk of a coordinator or of a lead, or of a worker by the
    number of its parameters and fragments. A lead writes neither publishes nor rounds
    of snapshots."""
    plan, placement, sync = terms.fragments, terms.placement, terms.run.sync
    sizes, cycle_s, islands = terms.sizes, terms.cycle_seconds, len(terms.hosts)
    if owner != "worker":
        params, fragments = plan.total, len(plan.fragments)
    part = params / plan.total
    state, publish = math.ceil(part * sizes.state), math.ceil(part * sizes.publish)
    deltas = max(0, most_deltas(terms) - placement.merge_buffer_bytes)
    deltas = math.ceil(part * deltas)
    in_bucket, kept = is_bucket(placement.checkpoints), placement.snapshots_kept
    # Snapshots pause so that the disk has time for the rest. A bucket is taken to be as
    # fast as the disk.
    round_s = max(
        placement.snapshot_every_s, BUSY_SHARE * state / terms.disk_bytes_per_s
    )
    # A fragment without a new version is not written again.
    rounds = max(round_s / cycle_s, 1.0)
    log = math.ceil((kept - 0.5) * rounds * publish)
    # All lines and points of the run's merges, and of its reports.
    cycles, model = terms.config.merges_per_fragment(), terms.run.model
    loads = model.experts * model.num_layers * (sync.weights_by_use == "rows")
    of_a_merge = LINES_PER_MERGE + islands * LINES_PER_DELTA
    of_a_cycle = fragments * of_a_merge + loads * LINES_PER_LOAD
    of_a_cycle += islands * sync.cycle * LINES_PER_STEP
    lines = of_merges = math.ceil(cycles * of_a_cycle)
    sources = len(terms.run.data.sources)
    of_a_report = LINES_PER_REPORT + sources * LINES_PER_SOURCE
    step_s = cycle_s / sync.cycle
    report_s = step_s * math.ceil(REPORTS_EVERY_S / step_s)
    reports = cycles * cycle_s / report_s * islands
    lines += math.ceil(reports * of_a_report)
    snapshots = kept * state + sizes.largest
    every, theta = placement.export_every, 4 * params
    # Cycles are kept by the lead.
    cycles_kept = 1 if owner == "worker" else placement.exports_kept + 1
    exports = cycles_kept * theta if every else 0
    if owner == "worker":
        lines = of_merges = 0
    elif owner == "lead":
        log, publish, deltas, snapshots = 0, 0, 0, state
    here = exports + (0 if in_bucket else snapshots)
    expected = log + lines + here
    late_log = math.ceil((0.5 * rounds + 1) * publish)
    least_log = math.ceil((kept + 1) * publish)  # As above, with a round a cycle.
    # A delta is put on the disk only where this stays free.
    spared = max(SPARED_BYTES, inbox.SPARED_BYTES_EACH * params if deltas else 0)
    reserve = late_log + deltas + spared
    return DiskPlan(
        snapshots=snapshots,
        log=log,
        lines=lines,
        exports=exports,
        expected=expected,
        late_log=late_log,
        deltas=deltas,
        spared=spared,
        reserve=reserve,
        bytes=expected + reserve,
        least=least_log + of_merges + here + deltas + spared,
        log_bytes_per_s=publish / cycle_s,
        snapshot_bytes_per_s=0.0 if owner == "lead" else state / round_s,
        export_bytes_per_s=theta / (every * cycle_s) if every else 0.0,
        round_seconds=round_s,
        in_bucket=in_bucket,
    )


def most_deltas(terms: Terms) -> int:
    """Return the bytes of all the deltas that may wait."""
    up = payload_bytes(terms.run.sync.codec_up, terms.fragments, up=True)
    return DELTAS_AT_ONCE * len(terms.hosts) * sum(up)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """One of `placement.workers` machines."""

    fragments: int
    params: int
    memory: int
    """Bytes: its share of what fragments take, and those of a process."""
    cores: float
    """Cores that merging and the wire of its fragments take, on average."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorPlan:
    """Bytes of the coordinator's memory, its cores and its disk."""

    theta: int
    anchors: int
    outer_state: int
    merge_state: int
    """State of the merge rule, and the measured tiles of the last merged deltas."""
    snapshots: int
    """Fragments that a snapshot still holds after merges replaced them."""
    kept_cycle: int
    """Fragments of a kept cycle that merges replace before they are on disk: all of
    them if the disk is slow; 0 without `placement.export_every`."""
    merging: int
    """Spare buffers of the merges under way, and the memory of the rule."""
    publishes: int
    """Encoded publishes, the newest one of each fragment: older ones are read from the
    disk for islands that missed some.
    """
    joins: int
    """Anchors pinned for islands that join, if all join at once."""
    merge_buffer: int
    """Encoded deltas, as many of each island and fragment as the inbox lets wait,
    within `placement.merge_buffer_bytes`."""
    process: int
    memory: int
    """Sum of the fields above."""
    wire_cores: float
    merge_cores: float
    disk_cores: float
    """For snapshots and kept cycles, which are written and sealed."""
    cores: int
    """Whole cores: those of wire, merges and disk, and one for everything else. With
    workers: those of each worker, and one for the lead."""
    workers: tuple[WorkerPlan, ...]
    """Empty if the coordinator is one process. What they take is in the sums above."""
    disks: tuple[DiskPlan, ...]
    """The lead's disk and those of workers, if there are any; else the only one."""
    merges: MergePlan
    disk: DiskPlan
    """As if one machine had all."""
    restart_seconds: float
    """Seconds from the death of the process until all fragments are back. The first
    ones are merged after `PROCESS_S`, or what was measured in its place, and little
    more. Every fragment's newest snapshot is read once, then its publishes since, half
    a round of them on average. Workers read from disks of their own, side by side."""

    @property
    def for_whom(self) -> str:
        """Whose machine cores and memory are for, if there are several."""
        count = len(self.workers)
        return f" on the machine of the largest of {count} workers" if count else ""

    @property
    def for_machine(self) -> str:
        """On which machine something is needed, if they are several."""
        return " on the machine that needs most" if self.workers else ""

    @property
    def machine_memory(self) -> int:
        """Bytes of memory that the machine needs, or the one that needs most."""
        return max(w.memory for w in self.workers) if self.workers else self.memory

    @property
    def machine_cores(self) -> int:
        """Cores that the machine needs, or the one that needs most."""
        each = [math.ceil(worker.cores) for worker in self.workers]
        return max(1, *each) if each else self.cores

    @property
    def share_served(self) -> float:
        """Largest share of all publishes that one machine sends."""
        sizes = [worker.params for worker in self.workers]
        return max(sizes) / sum(sizes) if sizes else 1.0


def plan_coordinator(terms: Terms) -> CoordinatorPlan:
    """Estimate the coordinator's memory, cores and disk."""
    plan, rates, sizes = terms.fragments, terms.rates, terms.sizes
    cycle_s, cores = terms.cycle_seconds, terms.machine.cores
    parts = _memory_parts(terms)
    up = sum(payload_bytes(terms.run.sync.codec_up, plan, up=True))
    both_ways = len(terms.hosts) * up * rates.upload_core_seconds
    both_ways += len(terms.asks) * sizes.publish * rates.fetch_core_seconds
    wire = both_ways / 1e9 / cycle_s
    disk, merges = plan_disk(terms), plan_merges(terms)
    beside_merges = disk.written_per_s - disk.log_bytes_per_s
    disk_cores = beside_merges / 1e9 * rates.write_core_seconds
    memory = sum(parts.values())
    merge_cores = merges.all_core_seconds / 1e9 * plan.total / cycle_s
    busy = wire + merge_cores + disk_cores
    dealt = _worker_plans(plan, terms.workers, memory - parts["process"], busy)
    needed = math.ceil(busy) if not dealt else 0
    disks: tuple[DiskPlan, ...] = (disk,)
    if dealt:
        own = (plan_disk(terms, "worker", w.params, w.fragments) for w in dealt)
        disks = (plan_disk(terms, "lead"), *own)
    round_s = max(own.round_seconds for own in disks[1:] or disks)
    replayed = round_s / 2 / cycle_s + 1
    service = terms.measured.restart_seconds
    share = max((w.params for w in dealt), default=plan.total) / plan.total
    return CoordinatorPlan(
        **parts,
        memory=memory,
        wire_cores=wire,
        merge_cores=merge_cores,
        disk_cores=disk_cores,
        cores=1 + needed + sum(max(1, math.ceil(w.cores)) for w in dealt),
        workers=dealt,
        disks=disks,
        merges=merges,
        disk=disk,
        restart_seconds=(service.value if service else PROCESS_S)
        + state_seconds(
            share * (sizes.state + replayed * sizes.publish),
            terms.disk_read_bytes_per_s,
            share * replayed * plan.total,
            rate_of(rates.replay_core_seconds, terms.run.sync.codec_down),
            rates.read_core_seconds,
            cores,
        ),
    )


def _memory_parts(terms: Terms) -> dict[str, int]:
    """Return the bytes of each part of the memory, by the plan's field."""
    plan, placement, sizes = terms.fragments, terms.placement, terms.sizes
    params, workers = 4 * plan.total, terms.workers
    rule_state, rule_bytes = _rule_bytes(terms.run, plan, len(terms.hosts))
    joins = len(terms.hosts) * FETCHES_PER_JOIN * 4 * max(plan.sizes)
    at_once = workers * merges_at_once(terms.machine.cores)
    return {
        "theta": params,
        "anchors": params,
        "outer_state": sizes.state - 2 * params,
        "merge_state": rule_state,
        "snapshots": workers * SNAPSHOT_COPIES * sizes.largest,
        "kept_cycle": params if placement.export_every else 0,
        "merging": at_once * (sizes.largest + rule_bytes),
        "publishes": sizes.publish,
        "joins": min(joins, 2 * params),
        "merge_buffer": min(most_deltas(terms), placement.merge_buffer_bytes),
        "process": PROCESS_BYTES * (1 if workers == 1 else 1 + workers),
    }


def _rule_bytes(run: RunConfig, plan: FragmentPlan, islands: int) -> tuple[int, int]:
    """Return the bytes that merges leave in memory, the measured tiles of deltas
    included, and the most that the merge of one piece takes."""
    # Many pieces, of few kinds.
    kinds = Counter((p.grid, p.embedding, p.expert) for p in plan.pieces)
    like = {(p.grid, p.embedding, p.expert): p for p in plan.pieces}
    rule = MERGE_RULES.find(run.sync.merge)
    rules = {kind: merging.rule_for(piece, rule) for kind, piece in like.items()}
    state = sum(
        count
        * (
            merging.state_bytes(rules[kind], like[kind].shape)
            + fragment_merge.sample_bytes(like[kind].grid)
        )
        for kind, count in kinds.items()
    )
    most = max(
        merging.merging_bytes(rules[kind], islands, like[kind].size) for kind in kinds
    )
    return state, most


def _worker_plans(
    plan: FragmentPlan, workers: int, held: int, cores: float
) -> tuple[WorkerPlan, ...]:
    """Divide the bytes that fragments take, and the cores, by the parameters that each
    worker has."""
    if workers == 1:
        return ()
    dealt = _dealt(plan, workers, [1] * len(plan.sizes))
    return tuple(
        WorkerPlan(
            fragments=fragments,
            params=params,
            memory=math.ceil(params / plan.total * held) + PROCESS_BYTES,
            cores=params / plan.total * cores,
        )
        for fragments, params in zip(
            dealt, _dealt(plan, workers, plan.sizes), strict=True
        )
    )


def _dealt(plan: FragmentPlan, workers: int, amounts: Sequence[int]) -> list[int]:
    """Sum the amounts of each worker's fragments."""
    owners, sums = deal(plan.sizes, workers), [0] * workers
    for owner, amount in zip(owners, amounts, strict=True):
        sums[owner] += amount
    return sums


# ---- outages ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutagePlan:
    """One restart of the coordinator, and one gathering."""

    restart_seconds: float
    """Seconds from the death of the process until all fragments are back from its disk.
    """
    held_seconds: float
    """Seconds for which islands hold data: `placement.outage_budget_s`, or more by the
    size of the state."""
    cycles_apart: float
    """Cycles that a restart takes, in which islands train apart."""
    share_apart: float
    """The same as a share of the run."""
    anchor_bytes: int
    """Bytes of every fragment's anchor, once."""
    ballot_bytes: int
    """Bytes of the ballots of all islands but the one that gives the anchor."""
    on_disk_bytes: int
    """Those of them for which `placement.merge_buffer_bytes` has no place."""
    gathering_seconds: float
    """Seconds of a gathering, at least: on the links, or on the disk, which keeps each
    fragment before it counts."""

    @property
    def lasts(self) -> bool:
        """True if islands hold data for as long as a restart takes."""
        return self.restart_seconds <= self.held_seconds

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        waits = "and no step waits" if self.lasts else "and then their steps wait"
        yield (
            f"while it is away: islands have data for {math.floor(self.held_seconds)} "
            f"s, {waits}; they train apart for {self.cycles_apart:.3g} cycles, "
            f"{self.share_apart:.2g} of the run"
        )
        ballots, spilled = self.ballot_bytes / 1e9, self.on_disk_bytes / 1e9
        yield (
            f"if its disk is lost: {self.anchor_bytes / 1e9:.3g} GB of anchors and "
            f"{ballots:.3g} GB of ballots about them, {spilled:.3g} of these on the "
            f"disk, are gathered in {self.gathering_seconds:.0f} s or more"
        )


def plan_outage(terms: Terms, coordinator: CoordinatorPlan) -> OutagePlan:
    """Return what an outage costs: arithmetic from sizes and rates."""
    fragments, config, cycle_s = terms.fragments, terms.config, terms.cycle_seconds
    anchors, islands = 4 * fragments.total, len(terms.hosts)
    ballots = (islands - 1) * sum(
        PayloadLayout.of_ballots(pieces).total_bytes for pieces in fragments.fragments
    )
    # What it takes in is bounded by what it may send, as far as that is known.
    egress = terms.machine.egress_gbit_per_s or math.inf
    gbit_per_s = min(islands * terms.link_up, egress)
    spilled = max(0, ballots - terms.placement.merge_buffer_bytes)
    written = anchors + coordinator.theta + coordinator.outer_state + spilled
    restart_s = coordinator.restart_seconds
    return OutagePlan(
        restart_seconds=restart_s,
        held_seconds=outage_seconds(config, fragments.total),
        cycles_apart=restart_s / cycle_s,
        share_apart=restart_s / cycle_s / config.merges_per_fragment(),
        anchor_bytes=anchors,
        ballot_bytes=ballots,
        on_disk_bytes=spilled,
        gathering_seconds=max(
            8e-9 * (anchors + ballots) / gbit_per_s, written / terms.disk_bytes_per_s
        ),
    )
