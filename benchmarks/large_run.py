"""A run of 300 M parameters whose coordinator is killed twice.

Question: two islands, one of them of two hosts (fsdp = 2), train a model of 315 M
parameters in 16 fragments for three cycles, with a full round of snapshots. The
coordinator is killed with SIGKILL between committed and sent, and between prepared and
committed. Are its memory and disk those of the plan? Do the islands notice? Does the
ledger balance, and does replay give the same bits? Does each byte cross the link of the
island of two hosts once?

Memory is the most that the coordinator's process had of its own, sampled five times a
second. Mapped files do not count: deltas and publishes that wait on the disk are
resident as long as nobody else needs the memory.

The inner optimizer has no moments, and nothing is fed back of what an encoding lost,
since both islands and the coordinator share one memory. The outer one has its momentum.

Prediction: memory, and the disk that is expected, within 10 % of the plan; no gap above
2 medians beyond the machine's own hiccups; the ledger exact, replay bit for bit; 1.00
of a one-host island's bytes.

Seen: all of it. The disk is compared with what a run of expected course holds. The plan
has room beside it for deltas that wait when merges are late, and hardly any do here.

Command: `python benchmarks/large_run.py`. Cost: about 20 minutes on two idle cores,
20 GiB of memory, 9 GB of disk; `--layers 2` is a trial of some minutes.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import support
import tape_checks
from machine import PeakUse, Stall

from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.hardware.machines import MeasuredValue, Measurements
from diloco_jax.planning.coordinator import CoordinatorPlan, plan_coordinator
from diloco_jax.planning.plan import fragments_of
from diloco_jax.planning.terms import terms_of

FRAGMENTS, CYCLES = 16, 3
SEQUENCE = 16
ISLANDS = {"one-host": 1, "two-hosts": 2}
"""Hosts, and as many devices and sequences."""
BUFFER_BYTES = 64 << 20
"""For deltas that wait for their merge: the rest waits on disk."""
GAP_MEDIANS_MAX = 2.0
PLAN_ERROR_MAX = 0.1
BYTES_MAX = 1.05
"""Bytes of the island of two hosts over those of the one of one host."""
TIMEOUT_S = 3000.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=8.0)
    parser.add_argument("--snapshot-every-s", type=float, default=100.0)
    options = parser.parse_args()
    config = large_config(
        options.layers, options.step_seconds, options.snapshot_every_s
    )
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        workdir = Path(folder) / "run"
        with Stall() as stall, PeakUse(workdir) as peaks:
            run = support.run_in(config, Path(folder), TIMEOUT_S)
        replayed = replay(workdir)
    planned = plan_of(run)
    memory = [
        {"part": field, "planned, MB": f"{getattr(planned, field) / 1e6:.0f}"}
        for field in MEMORY_PARTS
    ]
    checks = bounds(run, peaks, stall, planned)
    checks.append(support.none_of("replay", replayed))
    return support.write_results(
        options.out,
        "large_run",
        __doc__,
        {"Islands": islands_of(run), "Memory of the coordinator": memory},
        checks,
        {
            "summary": run.summary,
            "planned": dataclasses.asdict(planned),
            "memory_bytes": peaks.memory,
            "own_memory_bytes": peaks.own,
            "disk_bytes": peaks.disk,
            "stall_s": stall.longest_s,
            "outages_s": tape_checks.outage_seconds(run.tape),
        },
    )


MEMORY_PARTS = (
    "theta",
    "anchors",
    "outer_state",
    "merge_state",
    "snapshots",
    "merging",
    "publishes",
    "joins",
    "merge_buffer",
    "process",
    "memory",
)


def large_config(layers: int, step_seconds: float, snapshot_every_s: float) -> Config:
    """Return two islands of 16 M parameters per layer, and both kills."""
    merges = FRAGMENTS * CYCLES
    return Config(
        run=RunConfig(
            model=ModelConfig(
                d_model=1024,
                num_layers=layers,
                num_heads=16,
                num_kv_heads=8,
                head_dim=64,
                mlp_dim=4096,
            ),
            data=DataConfig(validation_fraction=0.005),
            inner=InnerConfig(optimizer="sgd", learning_rate=1e-2),
            sync=SyncConfig(
                steps_per_cycle=FRAGMENTS,
                fragments=FRAGMENTS,
                quorum=2,
                error_feedback=False,
            ),
            outer=OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6),
            sequence_length=SEQUENCE,
            total_tokens=merges * sum(ISLANDS.values()) * SEQUENCE,
        ),
        islands={
            name: IslandConfig(
                batch_size=hosts,
                hosts=hosts,
                mesh_fsdp=hosts,
                step_seconds=step_seconds,
            )
            for name, hosts in ISLANDS.items()
        },
        placement=Placement(
            faults=(
                f"coordinator@{round(0.4 * merges)}:kill",
                f"coordinator@{round(0.7 * merges)}:kill-prepared",
            ),
            snapshot_every_s=snapshot_every_s,
            checkpoint_every_s=0.0,
            merge_buffer_bytes=BUFFER_BYTES,
        ),
    ).validate()


def plan_of(run: support.Run) -> CoordinatorPlan:
    """Return what was planned for the steps that the run made."""
    config = run.config.replace("launch.coordinator_machine", "n2-highmem-2")
    pace = max(i["median_step_seconds"] for i in run.summary["islands"].values())
    steps = dict.fromkeys(config.islands, pace)
    disk = MeasuredValue(value=DISK_BYTES_PER_S, origin="this machine")
    measured = Measurements(disk_write_bytes_per_s=disk, disk_read_bytes_per_s=disk)
    fragments = fragments_of(config)
    return plan_coordinator(terms_of(config, fragments, steps, measured=measured))


DISK_BYTES_PER_S = 1e9
"""Rate of this machine's disk, for the plan: a bound on a round of snapshots."""


def bounds(
    run: support.Run, peaks: PeakUse, stall: Stall, planned: CoordinatorPlan
) -> list[support.Check]:
    """Check the run against the plan and the promises."""
    islands, tape = run.summary["islands"], run.tape
    sizes = support.fragment_sizes(run.config)
    crashes = len(tape_checks.outage_seconds(tape))
    struck = [] if crashes == 2 else [f"the coordinator came back {crashes} times"]
    checks = [
        within("memory over plan", peaks.own["coordinator"] / planned.memory),
        within("disk over plan, expected", peaks.disk / planned.disk.expected),
        support.none_of("faults that did not strike", struck),
        support.none_of(
            "ledger", tape_checks.ledger_problems(run.summary, tape, sizes)
        ),
        support.none_of("versions", tape_checks.version_problems(tape)),
    ]
    for way in ("bytes_up", "bytes_down", "bytes_join"):
        ratio = islands["two-hosts"][way] / islands["one-host"][way]
        checks.append(support.at_most(f"{way}, two hosts over one", ratio, BYTES_MAX))
    for name, island in islands.items():
        gap = island["max_step_gap_seconds"] - stall.longest_s
        what = f"{name}: longest gap beyond hiccups, medians"
        medians = gap / island["median_step_seconds"]
        checks.append(support.at_most(what, medians, GAP_MEDIANS_MAX, ".2f"))
    return checks


def within(what: str, ratio: float, most: float = PLAN_ERROR_MAX) -> support.Check:
    """Check that measured over planned is 1, within so much."""
    return support.Check(
        what, f"{ratio:.3f}", f"1 within {most:g}", abs(ratio - 1) <= most
    )


def replay(workdir: Path, until: int | None = None) -> list[str]:
    """Return what is wrong with a replay of the run, if anything. until: merges of one
    that is not over."""
    command = [*support.DILOCO, "replay", str(workdir), "--json"]
    command += [] if until is None else ["--until", str(until)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        return [f"exit code {done.returncode}: {done.stderr[-500:]}"]
    outcome = json.loads(done.stdout)
    if outcome["identical"] and outcome["merges"] == outcome["merges_on_tape"]:
        return []
    return [f"not the same bits: {outcome}"]


def islands_of(run: support.Run) -> list[dict[str, Any]]:
    """Return one row per island."""
    return [
        {
            "island": name,
            "steps": island["steps"],
            "median step, s": f"{island['median_step_seconds']:.2f}",
            "longest gap, s": f"{island['max_step_gap_seconds']:.2f}",
            "participation": f"{island['participation']:.3f}",
            "computed": island["tokens_computed"],
            "merged": island["tokens_merged"],
            "MB up": f"{island['bytes_up'] / 1e6:.0f}",
            "MB down": f"{island['bytes_down'] / 1e6:.0f}",
            "MB joined": f"{island['bytes_join'] / 1e6:.0f}",
            "lost": sum(island["tokens_lost"].values()),
        }
        for name, island in run.summary["islands"].items()
    ]


if __name__ == "__main__":
    support.script(main)
