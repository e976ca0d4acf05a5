"""A coordinator with workers under the deltas of 64 islands.

**Measured before lead and workers were one unit. To be measured anew.**

Question: 64 islands of 1 B parameters send int8 deltas to a real coordinator with two
workers, over mutual TLS, and fetch what it publishes. Are all islands in all merges?
What does a merged byte cost lead and workers, and what does the plan say of it? What
limits it here, and what would it carry on a machine of its own?

Islands are synthetic (`benchmarks/synthetic.py`): the product's network threads over
deltas that were made beforehand, 32 islands to a process. Everything shares this
machine, so what islands take of its cores is told apart. The length of a step is what
the plan's rates allow: coordinator and islands together are to use `--use` of the
cores.

*CPU* of a process is all of its threads', over the time from the first merge to the
stop. *Plan* is `diloco plan`'s arithmetic for the cycle that was measured: cores of the
wire (the coordinator's end), of merges and of files, and bytes of memory.

Prediction: every island in every merge at half of the cores; CPU within a quarter of
the plan; memory below it; the lead takes less than a twentieth of a core.

Seen: every island was in every merge but the first, which did not wait for those that
still joined. Workers took 1.6 of the plan at first: a fifth of their time was that of
the kernel for new pages of arriving deltas, which reuse memory now, and what is written
was not in the plan. (The disk's rate was measured soon after the rest.) In a profile
of one (0.25 B parameters, 32 islands) the kernel had 31 %, the interpreter 21, OpenSSL
16, merges 13, copies 7 and XXH3 4. What limits here is the CPU of both ends of the
wire.

Found, 2026-11-27, with 31 GB of disk, of which snapshots have 32: at the run's end all
48 fragments were open at once, memory was full of some deltas of each, and 17 of them
never had all of theirs before the deadline (0.923 of the islands in a merge). As many
as memory has room for are open since, and the end takes as long as the deltas' way. The
lead misses its twentieth of a core by a little; the machine had a load of 50.

Command: `python -m benchmarks.coordinator_load`. Cost: 18 minutes on two idle cores, 21
GiB of memory and 40 GB of disk.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import support
import tape_checks
from machine import cpu_seconds, number_of, peak_memory
from pinned import PinnedRun, cores, pinned_run
from synthetic import Deltas, SyntheticIsland, train

from diloco_jax import files
from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.models.build import build, build_plan
from diloco_jax.planning.coordinator import CoordinatorPlan, plan_coordinator
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.workdir import read_config

FRAGMENTS, SEQUENCE, PROCESSES = 48, 16, 2
SIDE, MATRICES = 4608, 48
QUICK_SIDE = 512
BUFFER_BYTES = 3 << 30
DISK_BYTES, DISK_FILES = 128 << 20, 4
START_S = 600.0
PARTICIPATION_MIN = 0.95
CPU_OVER_PLAN_MAX = 1.25
LEAD_CORES_MAX = 0.05


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--islands", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--side", type=int, default=SIDE, help="of 48 matrices")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--use", type=float, default=0.5, help="share of the cores")
    parser.add_argument("--members", nargs="*", help="used by itself")
    options = parser.parse_args()
    if options.members:
        return be_islands(*options.members)
    if options.quick:
        options.islands, options.side, options.cycles = 8, QUICK_SIDE, 2
    with tempfile.TemporaryDirectory(prefix="diloco-") as name:
        found = measured(options, Path(name))
    planned: CoordinatorPlan = found.pop("plan")
    checks = bounds(found, planned)
    if options.quick:  # Start and fixed costs are most of it.
        checks = checks[:1]
    tables = {"The load": facts(found, planned)}
    raw = {**found, "planned": dataclasses.asdict(planned)}
    return support.deliver(options, "coordinator_load", __doc__, tables, checks, raw)


def bounds(found: Mapping[str, Any], planned: CoordinatorPlan) -> list[support.Check]:
    """Return the bounds: first that of the ledger."""
    return [
        support.none_of("ledger", found["ledger"]),
        support.at_least(
            "islands in a merge, of all", found["participation"], PARTICIPATION_MIN
        ),
        support.at_most(
            "workers' CPU over the plan's",
            sum(found["worker_cores"]) / planned.busy_cores,
            CPU_OVER_PLAN_MAX,
        ),
        support.at_most(
            "memory over the plan's",
            sum(found["own_memory"].values()) / planned.memory,
            1.0,
        ),
        support.at_most("the lead, cores", found["lead_cores"], LEAD_CORES_MAX),
    ]


def config_of(options: Any, step_s: float) -> Config:
    """Return the config of the run."""
    sync = SyncConfig(
        steps_per_cycle=FRAGMENTS,
        fragments=FRAGMENTS,
        quorum=options.islands // 2,
        codec_up="int8",
        codec_down="int8",
    )
    tokens = options.cycles * FRAGMENTS * options.islands * SEQUENCE
    island = IslandConfig(batch_size=1, step_seconds=step_s)
    factory = f"{Path(__file__).with_name('matrices.py')}:model"
    return Config(
        run=RunConfig(
            model=ModelConfig(
                factory=factory, d_model=options.side, num_layers=MATRICES
            ),
            data=DataConfig(validation_fraction=0.005),
            outer=OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6),
            sync=sync,
            sequence_length=SEQUENCE,
            total_tokens=tokens,
        ),
        islands={f"island-{n:02}": island for n in range(options.islands)},
        placement=Placement(
            workers=options.workers,
            time_budget_s=120.0,
            evaluate_every_steps=0,
            merge_buffer_bytes=BUFFER_BYTES,
        ),
    )


def planned_for(
    config: Config, cycle_s: float, disk_bytes_per_s: float
) -> CoordinatorPlan:
    """Return the plan of the coordinator for cycles of that length, on a disk that
    writes so much."""
    config = resolve_outer(config)
    return plan_coordinator(
        config.run,
        config.placement,
        build_plan(config.run, build(config.run)),
        len(config.islands),
        cycle_s,
        cores=len(cores()),
        disk_bytes_per_s=disk_bytes_per_s,
        cycles=config.run.total_tokens / config.run.sync.steps_per_cycle,
    )


def bytes_per_s_written(folder: Path) -> float:
    """Write sealed files, as snapshots and publishes are; return the disk's rate."""
    block = np.random.default_rng(0).integers(0, 255, DISK_BYTES, np.uint8)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        began = time.perf_counter()
        for number in range(DISK_FILES):
            files.write_sealed(Path(scratch) / f"{number}", {}, [block])
        return DISK_FILES * DISK_BYTES / (time.perf_counter() - began)


def measured(options: Any, folder: Path) -> dict[str, Any]:
    """Run coordinator, workers and islands to their end."""
    disk = bytes_per_s_written(folder)
    second = planned_for(config_of(options, 1.0), 1.0, disk)
    # The islands' end of the wire costs as much as the coordinator's.
    busy_s = 2 * second.wire_cores + second.merge_cores
    step_s = max(0.2, busy_s / len(cores()) / options.use / FRAGMENTS)
    config = config_of(options, round(step_s, 2))
    certs, workers = folder / "certs", options.workers
    make_certificates(certs, [], 1, islands=config.islands, workers=workers)
    secured = dataclasses.replace(
        config.placement,
        certificates=str(certs),
        worker_addresses=tuple(f"127.0.0.1:{free_port()}" for _ in range(workers)),
    )
    config = dataclasses.replace(config, placement=secured)
    print(f"steps of {step_s:.2f} s", file=sys.stderr, flush=True)
    names = list(config.islands)
    with pinned_run(config, folder) as run:
        for process in range(PROCESSES):
            own = ",".join(names[process::PROCESSES])
            words = ["-m", "benchmarks.coordinator_load", "--members"]
            command = [sys.executable, *words, str(run.workdir), run.address, own]
            run.start(f"islands-{process}", command)
        use = watched(run, START_S + 4 * options.cycles * FRAGMENTS * step_s)
        finished = run.finish(START_S)
    islands = finished.summary["islands"].values()
    merged = [r for r in finished.tape if r["kind"] == "merged"]
    lasted = merged[-1]["time"] - merged[0]["time"]
    cycle_s = lasted / (len(merged) - 1) * FRAGMENTS
    sizes = support.fragment_sizes(config)
    up = sum(island["bytes_up"] for island in islands)
    down = sum(island["bytes_down"] for island in islands)
    whole_s = use["window_s"]
    return {
        "parameters": sum(sizes),
        "islands": options.islands,
        "step_s": config.islands[names[0]].step_seconds,
        "cycle_s": cycle_s,
        "merges": len(merged),
        "participation": statistics.mean(
            len(record["contributions"]) for record in merged
        )
        / options.islands,
        "longest_gap_s": max(island["max_step_gap_seconds"] for island in islands),
        "up_bytes": up,
        "down_bytes": down,
        "window_s": whole_s,
        "worker_cores": [use["cpu"][who] / whole_s for who in use["workers"]],
        "lead_cores": use["cpu"]["coordinator"] / whole_s,
        "islands_cores": sum(
            seconds for who, seconds in use["cpu"].items() if "islands" in who
        )
        / whole_s,
        "own_memory": use["own"],
        "peak_memory": use["peak"],
        "ledger": tape_checks.ledger_problems(finished.summary, finished.tape, sizes),
        "disk_bytes_per_s": disk,
        "plan": planned_for(config, cycle_s, disk),
    }


def watched(run: PinnedRun, timeout_s: float) -> dict[str, Any]:
    """Wait for the end; return what each process used between the first merge that was
    seen and the last one."""
    pids = run.pids()
    samples: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    own: dict[str, int] = collections.defaultdict(int)
    peak: dict[str, int] = collections.defaultdict(int)

    def over() -> bool:
        try:
            for who, pid in pids.items():
                samples[who].append((time.time(), cpu_seconds(pid)))
                if "islands" not in who:
                    anonymous = number_of(Path(f"/proc/{pid}/status"), "RssAnon:")
                    own[who] = max(own[who], 1024 * anonymous)
                    peak[who] = max(peak[who], peak_memory(pid))
        except (OSError, StopIteration):
            return True  # The first process has ended.
        return False

    run.until(over, timeout_s)
    tape = list(run.tape())
    began = next((r["time"] for r in tape if r["kind"] == "merged"), None)
    ended = next((r["time"] for r in tape if r["kind"] == "stopping"), None)
    if began is None or ended is None:
        said = run.log_of("coordinator")[-4000:]
        raise support.RunError(f"a process ended before the run:\n{said}")
    cpu = {}
    for who, taken in samples.items():
        inside = [each for each in taken if began <= each[0] <= ended]
        cpu[who] = inside[-1][1] - inside[0][1]
    workers = [who for who in pids if who.startswith("worker")]
    return {
        "cpu": cpu,
        "own": dict(own),
        "peak": dict(peak),
        "window_s": ended - began,
        "workers": workers,
    }


def be_islands(workdir: str, address: str, names: str) -> int:
    """Be the islands of these names, until the run is over."""
    config = read_config(Path(workdir))
    plan = build_plan(config.run, build(config.run))
    deltas = Deltas(config, plan)
    islands = [
        SyntheticIsland(config, name, address, plan, deltas)
        for name in names.split(",")
    ]
    found = train(islands, next(iter(config.islands.values())).step_seconds)
    print(json.dumps(found))
    return int(found["exit_code"])


def facts(found: Mapping[str, Any], planned: CoordinatorPlan) -> list[dict[str, str]]:
    """Return the rows of the page."""
    gigabytes = (found["up_bytes"] + found["down_bytes"]) / 1e9
    used = sum(found["worker_cores"])
    rate = gigabytes / (found["merges"] / FRAGMENTS) / found["cycle_s"]
    memory = sum(found["own_memory"].values())
    alone_s = planned.busy_cores * found["cycle_s"]
    rows = {
        "parameters": f"{found['parameters']:,}",
        "islands": f"{found['islands']}",
        "a step, s": f"{found['step_s']:.2f}",
        "a cycle, s": f"{found['cycle_s']:.1f} ({FRAGMENTS * found['step_s']:.1f})",
        "merges": f"{found['merges']}",
        "islands in a merge, of all": f"{found['participation']:.3f}",
        "up and down, GB/s": f"{rate:.2f}",
        "workers, cores": ", ".join(f"{c:.2f}" for c in found["worker_cores"]),
        "plan: wire, merges and disk, cores": f"{planned.wire_cores:.2f}, "
        f"{planned.merge_cores:.2f}, {planned.disk_cores:.2f}",
        "the lead, cores": f"{found['lead_cores']:.3f}",
        "the islands' end of the wire, cores": f"{found['islands_cores']:.2f}",
        "workers' core seconds per GB of deltas and publishes": f"{used / rate:.2f}",
        "shortest cycle of two cores of its own, by the plan, s": f"{alone_s / 2:.0f}",
        "memory, GB (plan)": f"{memory / 1e9:.1f} ({planned.memory / 1e9:.1f})",
    }
    return [{"what": what, "measured": value} for what, value in rows.items()]


if __name__ == "__main__":
    sys.exit(main())
