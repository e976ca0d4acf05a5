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
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

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

from diloco_jax import checkpoint, run_files
from diloco_jax.config import Config, IslandConfig
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.holding import deal

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
        workdir = Path(folder) / "run"
        with Stall() as stall, PeakUse(workdir) as peaks, DiskLoss(config, workdir):
            run = support.run_in(config, Path(folder), TIMEOUT_S)
        replayed = replay(workdir)
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


class DiskLoss:
    """Kills the struck worker once and removes its fragments' files, in a thread."""

    def __init__(self, config: Config, workdir: Path) -> None:
        dealt = deal(support.fragment_sizes(config), WORKERS)
        self._fragments = [f for f, worker in enumerate(dealt) if worker == STRUCK]
        self._config, self._workdir = config, workdir
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._strike_when_due, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(support.STOP_S)

    def _strike_when_due(self) -> None:
        while not self._ended.wait(1.0):
            kinds = self._kinds()
            back = kinds["recovered"] >= len(WORKER_KILLS)
            if back and kinds["merged"] >= DISK_AT:
                self._strike()
                return

    def _kinds(self) -> Counter[str]:
        with contextlib.suppress(Exception):  # The last line may be half written.
            tape = read_tape(self._workdir / run_files.TAPE)
            return Counter(record["kind"] for record in tape)
        return Counter()

    def _strike(self) -> None:
        command = [*support.DILOCO, "status", str(self._workdir), "--json"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60)
        workers = json.loads(told.stdout)["workers"]
        (pid,) = [worker["pid"] for worker in workers if worker["worker"] == STRUCK]
        os.kill(pid, signal.SIGKILL)
        snapshots = checkpoint.snapshots_folder(self._config.placement, self._workdir)
        for folder in (Path(snapshots), self._workdir / run_files.PUBLISHES):
            for fragment in self._fragments:
                shutil.rmtree(folder / f"{fragment:05d}", ignore_errors=True)
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
