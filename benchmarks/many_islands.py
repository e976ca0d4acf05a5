"""Sixty-four islands of one run, as real processes on one machine.

Question: 64 islands, each a process of its own with a tiny model and emulated steps of
4 s, train one model with one coordinator. How long until all are in? What do they cost
the coordinator in memory and CPU, and its thread of decisions per event? How large is a
status, and how long does it take? Is goodput that of a few islands, and the ledger
exact at the end?

Prediction, before the first run: all are in after 64 x 7 CPU seconds, on two idle cores
230 s; an island takes 190 MB, the coordinator 400 MB; the thread of decisions takes
0.25 ms per event (0.035 of it to decide, by decisions.md), less than 1 % of a core; a
status has 35 kB and takes less than 50 ms; goodput is 0.97 or more, with all islands in
every merge; the ledger is exact.

Found: half the time to start, since all but the first load their programs from the
cache. 0.7 ms per event rather than 0.25: statuses, tape, metrics and the roster come on
the same thread. The rest as predicted, beside other work on the machine.

Command: `python benchmarks/many_islands.py`. Cost: about 15 minutes on two idle cores,
13 GiB of memory; `--quick` runs 4 islands within a minute and writes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import support
import tape_checks
from machine import CpuSamples, Stall, sample_cpu
from turns import thread_seconds

from diloco_jax import run_files
from diloco_jax.cluster.cluster import LocalCluster
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    ModelConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.observability.tape import read_tape

MODEL = ModelConfig(factory=f"{Path(__file__).with_name('bigrams.py')}:model")
SEQUENCE, BATCH = 16, 2
FRAGMENTS, STEPS_PER_CYCLE = 8, 16
STATUS_ASKED = 20
TIMEOUT_S = 3600.0

GOODPUT_MIN = 0.95
STATUS_BYTES_MAX = 1000
"""Per island."""
LEAD_SHARE_MAX = 0.05
"""Share of a core, for the thread of decisions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of a run."""

    islands: int
    step_seconds: float
    measured_seconds: float
    start_seconds: float
    """Guess of the seconds that each island adds to the start; tokens follow from it.
    """


FULL = Scale(islands=64, step_seconds=4.0, measured_seconds=150.0, start_seconds=12.0)
QUICK = Scale(islands=4, step_seconds=0.5, measured_seconds=12.0, start_seconds=8.0)


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--islands", type=int, help="instead of 64 or 4")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    if options.islands:
        scale = dataclasses.replace(scale, islands=options.islands)
    found = measure(scale)
    tables = {"Measured": rows(found)}
    return support.deliver(
        options, "many_islands", __doc__, tables, bounds(found), found
    )


def island_config(scale: Scale) -> Config:
    """Return islands of one speed, with tokens for the start and what is measured."""
    # While they come in one after the other, half of them make steps on average.
    starting = scale.start_seconds * scale.islands / 2
    steps = (scale.measured_seconds + starting) / scale.step_seconds
    run = RunConfig(
        model=MODEL,
        data=DataConfig(validation_fraction=0.005),
        sync=SyncConfig(
            steps_per_cycle=STEPS_PER_CYCLE,
            fragments=FRAGMENTS,
            quorum=max(1, scale.islands // 2),
        ),
        sequence_length=SEQUENCE,
        total_tokens=round(steps) * scale.islands * BATCH * SEQUENCE,
    )
    island = IslandConfig(batch_size=BATCH, step_seconds=scale.step_seconds)
    names = (f"island-{number:02d}" for number in range(scale.islands))
    placement = Placement(
        # Two cores start all islands: one is silent while the others compile.
        time_budget_s=300.0,
        outage_budget_s=300.0,
        compile_budget_s=3000.0,
        bulk_channels=1,
        evaluate_every_steps=0,
    )
    islands = dict.fromkeys(names, island)
    return Config(run=run, islands=islands, placement=placement).validate()


def measure(scale: Scale) -> dict[str, Any]:
    """Return what a run showed while all islands trained, and at its end."""
    config = island_config(scale)
    with LocalCluster(config) as cluster, Stall() as stall:
        began = time.monotonic()
        cluster.until(
            lambda status: len(_training(status)) == scale.islands, timeout_s=TIMEOUT_S
        )
        all_in_s = time.monotonic() - began
        (coordinator,) = cluster.coordinator.pids
        stall.longest_s = 0.0
        cpu, statuses = _Cpu(cluster.workdir, coordinator), [_asked(cluster)]
        for _ in range(STATUS_ASKED):
            time.sleep(0.8 * scale.measured_seconds / STATUS_ASKED)
            statuses.append(_asked(cluster))
        window = cpu.spent()
        memory = {
            "coordinator": _memory(coordinator),
            "islands": [_memory(one.pids[0]) for one in cluster.islands.values()],
        }
        summary = cluster.wait(TIMEOUT_S)
        tape = list(read_tape(cluster.workdir / run_files.TAPE))
        ended_s = time.monotonic() - began
        tape_bytes = cluster.workdir.joinpath(run_files.TAPE).stat().st_size
    sizes = support.fragment_sizes(config)
    problems = tape_checks.ledger_problems(summary, tape, sizes)
    problems += tape_checks.version_problems(tape)
    participation = [i["participation"] for i in summary["islands"].values()]
    began_unix, ended_unix = window["from_unix"], window["to_unix"]
    inside = [line for line in tape if began_unix < line["time"] < ended_unix]
    merges = [line for line in inside if line["kind"] == "merged"]
    told = [line["record"]["kind"] for line in inside if line["kind"] == "island"]
    events = {
        "steps": _steps(statuses[-1][0]) - _steps(statuses[0][0]),
        "takes": told.count("took"),
        "merges": len(merges),
    }
    return {
        "islands": scale.islands,
        "step_seconds": scale.step_seconds,
        "all_in_seconds": all_in_s,
        "run_seconds": ended_s,
        "stall_seconds": stall.longest_s,
        "memory_bytes": memory,
        **window,
        "events": events,
        "lead_ms_per_event": 1e3 * window["lead_cpu_seconds"] / sum(events.values()),
        "status_bytes": max(len(json.dumps(status)) for status, _ in statuses),
        "status_seconds": [seconds for _, seconds in statuses],
        "goodput": summary["goodput"],
        "participation": participation,
        "merges": summary["merges"],
        "islands_per_merge": [len(merge["contributions"]) for merge in merges],
        "tape_bytes": tape_bytes,
        "tokens_lost": summary["tokens_lost"],
        "alerts": summary["alerts"],
        "problems": problems,
    }


class _Cpu:
    """CPU seconds of a run's processes since this object was made."""

    def __init__(self, workdir: Path, coordinator: int) -> None:
        self._workdir, self._pid = workdir, coordinator
        self._began, self._unix = self._sample(), time.time()

    def _sample(self) -> dict[str, float]:
        samples: CpuSamples = collections.defaultdict(list)
        sample_cpu(self._workdir, samples)
        found = {name: each[-1][1] for (name, _), each in samples.items()}
        # The coordinator decides on its main thread.
        found["lead"] = thread_seconds(self._pid)["main"]
        return found

    def spent(self) -> dict[str, float]:
        """Return the seconds, and the time in which they were spent."""
        now, unix = self._sample(), time.time()
        used = {name: now[name] - self._began.get(name, 0.0) for name in now}
        islands = [used[name] for name in used if name not in ("lead", "coordinator")]
        return {
            "from_unix": self._unix,
            "to_unix": unix,
            "seconds": unix - self._unix,
            "lead_cpu_seconds": used["lead"],
            "coordinator_cpu_seconds": used["coordinator"],
            "island_cpu_seconds_mean": statistics.fmean(islands),
        }


def _steps(status: dict[str, Any]) -> int:
    return sum(island["steps"] for island in status["islands"].values())


def _training(status: dict[str, Any]) -> list[str]:
    islands = status["islands"]
    return [n for n, island in islands.items() if island["state"] == "training"]


def _asked(cluster: LocalCluster) -> tuple[dict[str, Any], float]:
    """Return a status, and the seconds that it took."""
    began = time.monotonic()
    status = cluster.status()
    return status, time.monotonic() - began


def _memory(pid: int) -> dict[str, int]:
    """Return resident bytes, and the process's share of them (shared pages divided)."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss"):
            found[name.lower()] = int(value.split()[0]) * 1024
    return found


def bounds(found: dict[str, Any]) -> list[support.Check]:
    """Compare with what is asked of it."""
    lead = found["lead_cpu_seconds"] / found["seconds"]
    size = found["status_bytes"] / found["islands"]
    return [
        support.none_of("ledger and versions, by the tape", found["problems"]),
        support.at_least("goodput", found["goodput"], GOODPUT_MIN),
        support.at_most("bytes of a status per island", size, STATUS_BYTES_MAX, ".0f"),
        support.at_most("cores of the thread of decisions", lead, LEAD_SHARE_MAX),
    ]


def rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return what was measured as a table."""
    memory, seconds = found["memory_bytes"], found["seconds"]
    rss = [island["rss"] for island in memory["islands"]]
    pss = [island["pss"] for island in memory["islands"]]
    status_s = found["status_seconds"]
    per_merge = found["islands_per_merge"] or [0]
    figures = {
        "start until all are in": f"{found['all_in_seconds']:.0f} s",
        "memory of the coordinator": f"{memory['coordinator']['rss'] / 1e6:.0f} MB",
        "memory of an island, mean": f"{statistics.fmean(rss) / 1e6:.0f} MB resident, "
        f"{statistics.fmean(pss) / 1e6:.0f} MB with shared pages divided",
        "CPU of the coordinator": f"{found['coordinator_cpu_seconds'] / seconds:.3f} "
        f"cores",
        "CPU of its thread of decisions": f"{found['lead_cpu_seconds'] / seconds:.4f} "
        f"cores, {found['lead_ms_per_event']:.2f} ms per event",
        "events": ", ".join(f"{n} {what}" for what, n in found["events"].items())
        + f" in {seconds:.0f} s",
        "CPU of an island, mean": f"{found['island_cpu_seconds_mean'] / seconds:.4f} "
        f"cores",
        "status": f"{found['status_bytes'] / 1e3:.1f} kB, "
        f"{1e3 * statistics.median(status_s):.0f} ms with connecting, at most "
        f"{1e3 * max(status_s):.0f} ms",
        "islands in a merge, while all train": f"{statistics.fmean(per_merge):.1f}",
        "goodput": f"{found['goodput']:.3f}",
        "participation": f"{min(found['participation']):.2f} to "
        f"{max(found['participation']):.2f}",
        "merges": f"{found['merges']}",
        "tape": f"{found['tape_bytes'] / 1e6:.1f} MB in {found['run_seconds']:.0f} s",
        "tokens lost": f"{found['tokens_lost'] or 'none'}",
        "longest hiccup of the machine": f"{found['stall_seconds']:.2f} s",
    }
    return [{"what": what, "measured": value} for what, value in figures.items()]


if __name__ == "__main__":
    support.script(main)
