"""A run of two workers in which lead and worker are killed and a disk is lost.

Question: two islands train for three cycles of 16 fragments, which two worker processes
merge. A worker is killed with SIGKILL between prepared and committed, and its successor
between committed and sent. The next one is killed, and its disk is gone. Then the lead
is killed at the same two moments. Each time all of them start again. Does an island
notice? Is the ledger exact? Does one process give the same bits for the same decisions?

*Replay* repeats the decisions of the tape with one process that holds all fragments, so
it compares the bits of S = 2 with those of S = 1. It computes the anchors with which
lost fragments go on, too.

Prediction: no gap above 2 medians beyond the machine's own hiccups; the ledger exact,
and lost there exactly what was merged above the anchors; replay bit for bit.

Ticks go on while a worker or the lead is away, and merges do not. So the run has the
steps of six cycles, and every fragment is merged in three of them or more.

Command: `python -m benchmarks.workers`. Cost: about 25 minutes on two idle cores, 20
GiB of memory, 9 GB of disk; `--quick` takes 3 M parameters and shorter steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import support
import tape_checks
from large_run import (
    BUFFER_BYTES,
    CYCLES,
    FRAGMENTS,
    GAP_MEDIANS_MAX,
    TIMEOUT_S,
    large_config,
    replay,
)
from machine import PeakUse, Stall
from sizes import MODELS

from diloco_jax import run_files
from diloco_jax.cluster.cluster import free_port
from diloco_jax.cluster.processes import start_child
from diloco_jax.config import Config, IslandConfig
from diloco_jax.files import write_json
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.holding import deal
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.workdir import holds_run

WORKERS = 2
STRUCK = 0
"""The worker that is killed."""
STEPS = 2 * FRAGMENTS * CYCLES
DISK_AT = 24
LEAD_KILLS = (48, 54)
"""Merges of the run, which reaches them before its end even where each restart takes
ten steps. A worker counts the merges of its process."""
WORKER_KILLS = (5, 2)
QUICK_STEP_S = 2.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--layers", type=int, default=20, help="of 16 M parameters")
    parser.add_argument("--model", choices=MODELS, help="another model in their place")
    parser.add_argument("--step-seconds", type=float, default=8.0)
    parser.add_argument("--snapshot-every-s", type=float, default=100.0)
    options = parser.parse_args()
    if options.quick:
        options.model, options.step_seconds = "3m", QUICK_STEP_S
        options.snapshot_every_s = 10.0
    config = workers_config(options)
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        config = at_addresses(config, Path(folder) / "certificates")
        with Stall() as stall, PeakUse(Path(folder) / "run") as peaks:
            run = run_unit(config, Path(folder))
        replayed = replay(run.workdir)
    return support.deliver(
        options,
        "workers",
        __doc__,
        {
            "Islands": [row(*each) for each in run.summary["islands"].items()],
            "Strikes": strikes_of(run.tape),
        },
        [*bounds(run, stall), support.none_of("replay", replayed)],
        {
            "parameters": sum(support.fragment_sizes(run.config)),
            "summary": run.summary,
            "memory_bytes": peaks.memory,
            "own_memory_bytes": peaks.own,
            "stall_s": stall.longest_s,
            "outages_s": tape_checks.outage_seconds(run.tape),
        },
    )


def workers_config(options: Any) -> Config:
    """Return the config: two islands of one host each, both kinds of kills."""
    config = large_config(
        options.layers, options.step_seconds, options.snapshot_every_s
    )
    run = config.run
    if options.model:
        run = dataclasses.replace(run, model=MODELS[options.model])
    island = IslandConfig(batch_size=1, step_seconds=options.step_seconds)
    first, second = WORKER_KILLS
    committed, prepared = LEAD_KILLS
    placement = dataclasses.replace(
        config.placement,
        workers=WORKERS,
        merge_buffer_bytes=WORKERS * BUFFER_BYTES,
        faults=(
            f"worker-{STRUCK}@{first}:kill-prepared",
            f"worker-{STRUCK}#2@{second}:kill",
            f"coordinator@{committed}:kill",
            f"coordinator@{prepared}:kill-prepared",
        ),
    )
    run = dataclasses.replace(run, total_tokens=STEPS * 2 * run.sequence_length)
    islands = dict.fromkeys(("a", "b"), island)
    return Config(run=run, islands=islands, placement=placement).validate()


def at_addresses(config: Config, certificates: Path) -> Config:
    """Return the config with ports and keys for all, its workers included."""
    workers = config.placement.workers if config.placement.workers > 1 else 0
    make_certificates(
        certificates, [], 1, islands=list(config.islands), workers=workers
    )
    ports = [f"127.0.0.1:{free_port()}" for _ in range(workers + 1)]
    placement = dataclasses.replace(
        config.placement,
        bind=ports[0],
        worker_addresses=tuple(ports[1:]),
        certificates=str(certificates),
    )
    return dataclasses.replace(config, placement=placement).validate()


def run_unit(config: Config, folder: Path) -> support.Run:
    """Run to the end; a process that ends with an error is started again. The struck
    worker is killed once more, and loses its disk."""
    path, workdir = folder / run_files.CONFIG, folder / "run"
    write_json(dataclasses.asdict(config), path)
    address = config.placement.bind
    commands = {
        f"worker-{n}": ["worker", "--index", f"{n}"] for n in range(WORKERS)
    } | {
        "coordinator": ["coordinator", "--init"],
        **{
            n: ["island", "--name", n, "--coordinator", address] for n in config.islands
        },
    }
    running: dict[str, subprocess.Popen[bytes]] = {}
    deadline, struck = time.monotonic() + TIMEOUT_S, False

    def start(name: str) -> None:
        command, *options = commands[name]
        own = workdir if name == "coordinator" else folder / name
        words = [command, str(path), "--workdir", str(own), *options]
        if holds_run(workdir):
            words = [word for word in words if word != "--init"]
        with (folder / f"{name}.log").open("ab") as log:
            running[name] = start_child([*support.DILOCO, *words], {}, log, log)

    try:
        while any(running.get(n) is None or running[n].poll() != 0 for n in commands):
            for name in commands:
                if name not in running or running[name].poll():
                    start(name)
            kinds = kinds_of(workdir)
            if not struck and kinds["recovered"] >= len(WORKER_KILLS):
                struck = kinds["merged"] >= DISK_AT
                if struck:
                    lose_disk(running[f"worker-{STRUCK}"], folder / f"worker-{STRUCK}")
            if time.monotonic() > deadline:
                raise support.RunError(f"not done within {TIMEOUT_S:g} s")
            time.sleep(1.0)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return support.Run(
        config=config,
        workdir=workdir,
        summary=json.loads((workdir / run_files.SUMMARY).read_bytes()),
        tape=list(read_tape(workdir / run_files.TAPE)),
        metrics=list(read_metrics(workdir)),
        cpu={},
    )


def kinds_of(workdir: Path) -> Counter[str]:
    """Count the lines of the tape by kind."""
    with contextlib.suppress(Exception):  # The last line may be half written.
        tape = read_tape(workdir / run_files.TAPE)
        return Counter(record["kind"] for record in tape)
    return Counter()


def lose_disk(worker: subprocess.Popen[bytes], workdir: Path) -> None:
    """Kill the worker, and remove its fragments' files."""
    worker.kill()
    worker.wait()
    for name in ("checkpoints", run_files.PUBLISHES):
        shutil.rmtree(workdir / name, ignore_errors=True)
    when = time.strftime("%H:%M:%S")
    print(f"{when} worker {STRUCK} has lost its disk", file=sys.stderr, flush=True)


def bounds(run: support.Run, stall: Stall) -> list[support.Check]:
    """Check the run against the promises."""
    tape, sizes = run.tape, support.fragment_sizes(run.config)
    kinds = Counter(record["kind"] for record in tape)
    dealt = deal(sizes, WORKERS)
    begun = {r["fragment"] for r in tape if r["kind"] == "term_begun"}
    merged = Counter(r["fragment"] for r in tape if r["kind"] == "merged")
    few = [f"{f}: {merged[f]} times" for f in range(FRAGMENTS) if merged[f] < CYCLES]
    lacking = [f for f, w in enumerate(dealt) if w == STRUCK and f not in begun]
    wanted = len(LEAD_KILLS) + len(WORKER_KILLS) + 1
    struck = []
    if kinds["recovered"] < wanted:
        struck.append(f"{kinds['recovered']} starts again, expected {wanted} or more")
    checks = [
        support.none_of("strikes that did not happen", struck),
        support.none_of("fragments not gathered", list(map(str, lacking))),
        support.none_of(f"fragments merged less than {CYCLES} times", few),
        support.none_of(
            "ledger", tape_checks.ledger_problems(run.summary, tape, sizes)
        ),
        support.none_of(
            "tokens lost with versions", tape_checks.lost_merges_problems(tape)
        ),
        support.none_of("versions", tape_checks.version_problems(tape)),
    ]
    for name, island in run.summary["islands"].items():
        gap = island["max_step_gap_seconds"] - stall.longest_s
        what = f"{name}: longest gap beyond hiccups, medians"
        medians = gap / island["median_step_seconds"]
        checks.append(support.at_most(what, medians, GAP_MEDIANS_MAX, ".2f"))
    return checks


def strikes_of(tape: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per start again, and per fragment gathered."""
    rows, merges = [], 0
    for record in tape:
        match record["kind"]:
            case "merged":
                merges += 1
            case "recovered":
                what = f"all are back, {record['discarded']} merges discarded"
                rows.append({"merges": merges, "what": what})
            case "term_begun":
                version, replaced = record["version"], record["replaced"]
                what = (
                    f"fragment {record['fragment']} goes on at {version} with "
                    f"{replaced} of {record['island']}, "
                    f"{sum(record['lost_tokens'].values())} tokens lost"
                )
                rows.append({"merges": merges, "what": what})
    return rows


def row(name: str, island: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an island."""
    return {
        "island": name,
        "steps": island["steps"],
        "median step, s": f"{island['median_step_seconds']:.2f}",
        "longest gap, s": f"{island['max_step_gap_seconds']:.2f}",
        "participation": f"{island['participation']:.3f}",
        "computed": island["tokens_computed"],
        "merged": island["tokens_merged"],
        "lost": sum(island["tokens_lost"].values()),
    }


if __name__ == "__main__":
    support.script(main)
