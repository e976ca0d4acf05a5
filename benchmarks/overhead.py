"""The step of an island beside that of the same loop alone.

Question: how much longer is the step of an island whose fragments are merged all the
time? Two islands train with H = P = 24, so that at every step a fragment is taken and
one is adopted, int8 both ways. Each island has a core of its own; the coordinator runs
on either. The same loop alone (the same model, batch, optimizer and data, the loss read
one step late) runs twice side by side, on the same cores. All have the allocator's
settings of `diloco run`.

Run and loops take turns of 6 s: whoever has none is stopped (SIGSTOP). So what slows
the machine for a minute slows both; when each ran to its end in turn, the loop alone
varied by a tenth from one turn to the next, five times what the bound leaves. *Step* is
the ratio of mean times between steps, the time of own turns counted. The coordinator
takes CPU from the islands' cores, here, which a slice's host would not notice: *beyond
the coordinator* is without its seconds. *CPU* is the ratio of CPU seconds per step, of
all threads of the island: on one core it is what the step takes. *Stalled* is what the
summary says of both islands, over their steps.

*Threads* is the profile: where the CPU seconds of a step go, by the kernel's names of
threads. Those of Python are all "python", but for the first one.

Prediction: 1.02 for 3 M parameters, 1.01 for 10 M; the step grows with parameters times
tokens, and takes and adoptions with parameters alone, which would favour neither; the
fixed costs per message favour the larger one. Stalled 0.1 %.

Seen, 2026-11-27: neither size holds its bound. About half of what is above 1 are pages:
a step's temporaries go back to the system, whose clearing of pages for the next step
takes 94 to 245 ms of system time, live and alone. With `--keep-pages` malloc keeps them
for the next step. Then steps alone take 0.628 and 0.910 s instead of 0.740 and 1.015,
and CPU is 1.025 (3 M) and 1.030 (10 M), the step beyond the coordinator 1.024 and
1.029. Islands do not have those settings: with 87 M parameters they came to 1.15 to
1.46 of a plain loop and its anchors (island_memory.md).

Of the 26 ms that a step of 10 M parameters takes more then, 11 are of XLA's threads,
which make takes and adoptions (3 ms a fragment by themselves), 13 of Python's and 2 of
gRPC's. No Python function stands out in samples of 3 M: sender, receiver, uploads,
control and reports each wake up about once per step, and take 1 to 3 ms. Here the core
of the host is the device, too; on a slice those threads have the host's cores, beside
the chips.

When run and loops ran to their ends in turn, without the allocator's settings, three
pairs had 0.998, 1.106 and 1.058 (3 M), and 1.019 (10 M): the loop alone had varied by a
tenth. Then 190 of 940 ms of a live step of 3 M, and 169 of 854 alone, were the
kernel's, for page faults of XLA's temporaries; with the settings they were 120 of 830,
and 114 of 789 (looks of 40 s).

Command: `python -m benchmarks.overhead`. Cost: about 22 minutes on two cores.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import support
from pinned import PinnedRun, cores, pinned_run
from sizes import MODELS
from turns import Turns

from diloco_jax.cluster.cluster import ALLOCATOR
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)

RATIO_MAX = 1.02
STALLED_MAX = 0.005
FRAGMENTS = 24
BATCHES = {"3m": 8, "10m": 4}
SEQUENCE = 256
STEPS = {"3m": 160, "10m": 120}
"""That are measured, after those that compile."""
FIRST = FRAGMENTS // 2
TURN_S = 6.0
NAMES = ("a", "b")
TIMEOUT_S = 1800.0
LIVE, ALONE = "island", "alone"
KEEP_PAGES = {
    "GLIBC_TUNABLES": (
        "glibc.malloc.hugetlb=1"
        ":glibc.malloc.arena_max=1"
        ":glibc.malloc.mmap_threshold=4294967296"
        ":glibc.malloc.trim_threshold=4294967296"
    )
}
"""Settings with which malloc keeps a step's temporaries, one block of hundreds of MiB,
for the next step."""
Row = dict[str, str]


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--keep-pages", action="store_true", help="between steps")
    parser.add_argument("--alone", nargs=2, metavar=("SIZE", "FILE"), help="by itself")
    options = parser.parse_args()
    if options.alone:
        size, file = options.alone
        alone_here(size, options.batch, Path(file))
    sizes, runs, steps = list(BATCHES), options.runs, STEPS
    allocator = KEEP_PAGES if options.keep_pages else ALLOCATOR
    if options.quick:
        sizes, runs, steps, options.batch = sizes[:1], 1, {"3m": FRAGMENTS}, 2
    found = {
        size: [
            measured(size, options.batch or BATCHES[size], steps[size], allocator)
            for _ in range(runs)
        ]
        for size in sizes
    }
    rows, profile, checks = [], [], []
    for size, each in found.items():
        of = {
            name: [one[name] for one in each] for name in each[0] if name != "threads"
        }
        rows.append(
            {
                "model": size,
                "step alone, s": support.spread(of["alone_s"]),
                "step": support.spread(of["ratio"]),
                "beyond the coordinator": support.spread(of["beyond"]),
                "CPU": support.spread(of["cpu_ratio"]),
                "stalled": support.spread(of["stalled"], ".4f"),
                "coordinator, cores": support.spread(of["coordinator"]),
                "takes per step": support.spread(of["takes"], ".2f"),
            }
        )
        profile += thread_rows(size, [one["threads"] for one in each])
        middle = {name: statistics.median(values) for name, values in of.items()}
        checks += [
            support.at_most(f"{size}: CPU of a step", middle["cpu_ratio"], RATIO_MAX),
            support.at_most(
                f"{size}: step beyond the coordinator", middle["beyond"], RATIO_MAX
            ),
            support.at_most(f"{size}: stalled", middle["stalled"], STALLED_MAX, ".4f"),
            support.at_least(f"{size}: takes per step", middle["takes"], 0.8, ".2f"),
        ]
    tables = {f"{runs} runs": rows, "Threads, CPU ms per step": profile}
    return support.deliver(
        options, "overhead", __doc__, tables, checks, {"sizes": found}
    )


def thread_rows(size: str, runs: list[dict[str, dict[str, float]]]) -> list[Row]:
    """Return the CPU of a step by thread, means of the runs in milliseconds."""
    means = {
        who: {
            name: 1000 * statistics.fmean(run[who].get(name, 0.0) for run in runs)
            for name in sorted({name for run in runs for name in run[who]})
        }
        for who in (LIVE, ALONE)
    }
    rows = []
    for name in sorted({*means[LIVE], *means[ALONE]}):
        live, alone = (means[who].get(name, 0.0) for who in (LIVE, ALONE))
        if max(live, alone) >= 0.05:
            row = {"island": f"{live:.1f}", "alone": f"{alone:.1f}"}
            rows.append({"model": size, "thread": name, **row})
    return rows


def config_of(size: str, batch: int, steps: int) -> Config:
    """Return two islands that make so many steps each."""
    return Config(
        run=RunConfig(
            model=MODELS[size],
            data=DataConfig(validation_fraction=0.005),
            sync=SyncConfig(steps_per_cycle=FRAGMENTS, fragments=FRAGMENTS, quorum=1),
            sequence_length=SEQUENCE,
            total_tokens=len(NAMES) * steps * batch * SEQUENCE,
        ),
        islands=dict.fromkeys(NAMES, IslandConfig(batch_size=batch)),
        placement=Placement(evaluate_every_steps=0, time_budget_s=300.0),
    ).validate()


def measured(
    size: str, batch: int, steps: int, allocator: Mapping[str, str]
) -> dict[str, Any]:
    """Let a run and two loops alone take turns; return figures, means of both.
    allocator: environment of islands and loops."""
    print(f"{time.strftime('%H:%M:%S')} {size}", file=sys.stderr)
    config = config_of(size, batch, 2 * FIRST + steps)
    with (
        tempfile.TemporaryDirectory(prefix="diloco-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        run = stack.enter_context(pinned_run(config, folder, environment=ALLOCATOR))
        loops = [
            stack.enter_context(
                loop_alone(size, batch, core, folder / f"{core}", allocator)
            )
            for core in cores()
        ]
        for island, core in zip(NAMES, cores(), strict=False):
            run.island(island, core, environment=allocator)
        run.until(lambda: all(made(run, loops, FIRST)), TIMEOUT_S)
        pids = run.pids()
        groups = {LIVE: list(pids.values()), ALONE: [loop.pid for loop in loops]}
        turns = Turns(groups, TURN_S)
        begun = time.time()

        def reached() -> bool:
            turns()
            return all(made(run, [], FIRST + steps))

        run.until(reached, TIMEOUT_S)
        ended = turns.turns[LIVE][-1][1]
        lives = [
            one_live(turns, pids[island], run.metrics(), island, begun, ended)
            for island in NAMES
        ]
        alones = [one_alone(turns, loop, begun, ended) for loop in loops]
        spent = turns.cpu(pids["coordinator"], ended)
        spent -= turns.cpu(pids["coordinator"], begun)
        coordinator = spent / turns.ran(LIVE, begun, ended)
        turns.end()
        for loop in loops:
            loop.kill()
        done = run.finish(TIMEOUT_S)
    live, alone = mean_of(lives), mean_of(alones)
    islands = done.summary["islands"].values()
    takes = sum(
        record["kind"] == "island" and record["record"]["kind"] == "took"
        for record in done.tape
    )
    stepped = sum(island["step_seconds"] for island in islands)
    ratio = live["mean_s"] / alone["mean_s"]
    return {
        "alone_s": alone["mean_s"],
        "alone_cpu_s": alone["cpu_s"],
        "live_s": live["mean_s"],
        "live_cpu_s": live["cpu_s"],
        "ratio": ratio,
        "beyond": ratio * (1 - coordinator / len(NAMES)),
        "cpu_ratio": live["cpu_s"] / alone["cpu_s"],
        "stalled": sum(island["stalled_seconds"] for island in islands) / stepped,
        "coordinator": coordinator,
        "takes": takes / sum(island["steps"] for island in islands),
        "threads": {LIVE: live["threads"], ALONE: alone["threads"]},
    }


def made(run: PinnedRun, loops: list[Loop], steps: int) -> Iterator[bool]:
    """Tell of each island and loop if it has made so many steps."""
    latest = dict.fromkeys(NAMES, 0)
    for line in run.metrics():
        if line["kind"] == "island":
            latest[str(line["island"])] = int(str(line["step"]))
    yield from (step >= steps for step in latest.values())
    yield from (len(loop.steps()) >= steps for loop in loops)


def one_live(
    turns: Turns,
    pid: int,
    metrics: list[dict[str, Any]],
    name: str,
    begun: float,
    ended: float,
) -> dict[str, Any]:
    """Return seconds, CPU and threads per step of an island in its turns."""
    lines = [
        (line["time"], line["step"])
        for line in metrics
        if line["kind"] == "island" and line["island"] == name
        if begun <= line["time"] <= ended
    ]
    (first, before), (last, after) = lines[0], lines[-1]
    count = after - before
    cpu = turns.cpu(pid, last) - turns.cpu(pid, first)
    return per_step(turns, LIVE, pid, first, last, cpu, count)


def one_alone(turns: Turns, loop: Loop, begun: float, ended: float) -> dict[str, Any]:
    """Return seconds, CPU and threads per step of a loop alone in its turns."""
    lines = [(at, cpu) for at, cpu in loop.steps() if begun <= at <= ended]
    (first, before), (last, after) = lines[0], lines[-1]
    count = len(lines) - 1
    return per_step(turns, ALONE, loop.pid, first, last, after - before, count)


def per_step(
    turns: Turns,
    group: str,
    pid: int,
    first: float,
    last: float,
    cpu: float,
    count: int,
) -> dict[str, Any]:
    """Return what one step takes: means of `count` steps."""
    # Threads are counted from the first turn on, until now.
    threads = turns.threads(pid)
    whole = sum(threads.values())
    return {
        "mean_s": turns.ran(group, first, last) / count,
        "cpu_s": cpu / count,
        "threads": {name: s / whole * cpu / count for name, s in threads.items()},
    }


def mean_of(both: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over two processes, by thread too."""
    names = {name for one in both for name in one["threads"]}
    threads = {
        name: statistics.fmean(one["threads"].get(name, 0.0) for one in both)
        for name in names
    }
    means = {
        key: statistics.fmean(one[key] for one in both) for key in ("mean_s", "cpu_s")
    }
    return {**means, "threads": threads}


class Loop:
    """A loop alone, a process of its own on one core."""

    def __init__(
        self, command: list[str], file: Path, environment: Mapping[str, str]
    ) -> None:
        self._file = file
        file.touch()
        env = os.environ | dict(environment)
        self._process = subprocess.Popen(command, env=env)
        self.pid = self._process.pid

    def steps(self) -> list[tuple[float, float]]:
        """Return the end of each step: unix seconds, and CPU seconds so far."""
        lines = self._file.read_text().splitlines()
        return [(float(at), float(cpu)) for at, cpu in map(str.split, lines)]

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def loop_alone(
    size: str, batch: int, core: int, file: Path, environment: Mapping[str, str]
) -> Iterator[Loop]:
    """Run the loop alone on that core while the block lasts. environment: more."""
    command = ["taskset", "--cpu-list", str(core), sys.executable, __file__]
    command += ["--alone", size, str(file), "--batch", str(batch)]
    loop = Loop(command, file, environment)
    try:
        yield loop
    finally:
        loop.kill()


def alone_here(size: str, batch_size: int, file: Path) -> NoReturn:
    """Make the steps of an island without any other process until this one is killed;
    write the end of each into `file`."""
    import numpy as np

    from diloco_jax.data.loading import load_data
    from diloco_jax.data.reader import BatchReader
    from diloco_jax.island.device.build import build_trainer
    from diloco_jax.island.device.step import TrainState

    config = config_of(size, batch_size, FRAGMENTS)
    run = config.run
    _, trainer = build_trainer(run, config.islands[NAMES[0]])
    reader = BatchReader(load_data(run).index(run.seed), trainer.fields, SEQUENCE)
    params = trainer.first(run.seed)
    state, before = TrainState(params, trainer.init_inner(params)), None
    with file.open("w", buffering=1) as ends:
        for step in itertools.count():
            rows = np.arange(step * batch_size, (step + 1) * batch_size)
            batch = trainer.put_batch(reader.batch(rows))
            state, metrics = trainer.step(state, batch, run.inner.learning_rate)
            if before is not None:
                {name: float(value) for name, value in before.items()}
            before = metrics
            ends.write(f"{time.time()} {time.process_time()}\n")
    raise AssertionError("steps have no end")


if __name__ == "__main__":
    support.script(main)
