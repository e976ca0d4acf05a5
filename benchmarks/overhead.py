"""The step of an island beside that of the same loop alone.

Question: how much longer is the step of an island whose fragments are merged all the
time? Two islands train with H = P = 24, so that at every step a fragment is taken and
one is adopted, int8 both ways. Each island has a core of its own; the coordinator runs
on either. The same loop alone (the same model, batch, optimizer and data, the loss read
one step late) runs twice side by side, on the same cores.

Live and alone take turns. *Step* is the ratio of median times between steps. The
coordinator takes CPU from the islands' cores, here, which a slice's host would not
notice: *beyond the coordinator* is the ratio of means without its seconds. *CPU* is the
ratio of CPU seconds per step, of all threads of the island: on one core it is what the
step takes, and the rest of the machine disturbs it least. It is also what the bound
refers to. *Stalled* is what the summary says of both islands, over their steps.

Prediction: 1.02 for 3 M parameters, 1.01 for 10 M; the step grows with parameters times
tokens, and takes and adoptions with parameters alone, which would favour neither; the
fixed costs per message favour the larger one. Stalled 0.1 %.

Seen, 2026-11-26: three pairs do not tell whether the bound of 3 M parameters holds. CPU
of a step was 0.998, 1.106 and 1.058 of the loop alone, and the loop alone took 0.567,
0.521 and 0.574 s itself: it varied by a tenth from turn to turn, five times what the
bound leaves. (Two pairs on an AMD EPYC the day before were 1.019 and 1.045.) *Takes per
step* is above 1 since those of the flush are counted, one more of each fragment.

Command: `python -m benchmarks.overhead`. Cost: about 12 minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import support
from pinned import cores, pinned_run
from sizes import MODELS

from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.files import write_json

RATIO_MAX = 1.02
STALLED_MAX = 0.005
FRAGMENTS = 24
BATCHES = {"3m": 8, "10m": 4}
SEQUENCE = 256
MIN_REPORTS = 4
"""An island reports once a second."""
NAMES = ("a", "b")
TIMEOUT_S = 1800.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3 * FRAGMENTS)
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--alone", nargs=2, metavar=("SIZE", "FILE"), help="by itself")
    options = parser.parse_args()
    if options.alone:
        size, file = options.alone
        write_json(alone_here(size, options.batch, options.steps), Path(file))
        return 0
    sizes, pairs, steps = list(BATCHES), options.pairs, options.steps
    if options.quick:
        sizes, pairs, steps, options.batch = sizes[:1], 1, 4 * FRAGMENTS, 2
    found = {
        size: [pair(size, options.batch or BATCHES[size], steps) for _ in range(pairs)]
        for size in sizes
    }
    rows, checks = [], []
    for size, measured in found.items():
        of = {name: [one[name] for one in measured] for name in measured[0]}
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
        middle = {name: statistics.median(values) for name, values in of.items()}
        checks += [
            support.at_most(f"{size}: CPU of a step", middle["cpu_ratio"], RATIO_MAX),
            support.at_most(
                f"{size}: step beyond the coordinator", middle["beyond"], RATIO_MAX
            ),
            support.at_most(f"{size}: stalled", middle["stalled"], STALLED_MAX, ".4f"),
            support.at_least(f"{size}: takes per step", middle["takes"], 0.8, ".2f"),
        ]
    tables = {f"{pairs} pairs of {steps} steps": rows}
    return support.deliver(
        options, "overhead", __doc__, tables, checks, {"sizes": found}
    )


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


def pair(size: str, batch: int, steps: int) -> dict[str, float]:
    """Measure the loops alone, then the run."""
    for what in ("alone", "live"):
        print(f"{time.strftime('%H:%M:%S')} {size}, {what}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
            if what == "alone":
                alone = alone_on_each_core(size, batch, steps, Path(folder))
            else:
                live = live_on_each_core(size, batch, steps, Path(folder))
    coordinator = live["coordinator"]
    shared = 1 - coordinator / len(NAMES)
    return {
        "alone_s": alone["median_s"],
        "alone_cpu_s": alone["cpu_s"],
        "live_s": live["median_s"],
        "live_cpu_s": live["cpu_s"],
        "ratio": live["median_s"] / alone["median_s"],
        "beyond": live["mean_s"] * shared / alone["mean_s"],
        "cpu_ratio": live["cpu_s"] / alone["cpu_s"],
        "stalled": live["stalled"],
        "coordinator": coordinator,
        "takes": live["takes"],
    }


def live_on_each_core(
    size: str, batch: int, steps: int, folder: Path
) -> dict[str, float]:
    """Return figures of a run: means of both islands from 12 steps on."""
    with pinned_run(config_of(size, batch, steps), folder) as run:
        for name, core in zip(NAMES, cores(), strict=False):
            run.island(name, core)
        done = run.finish(TIMEOUT_S)
    islands = done.summary["islands"]
    training = [
        line
        for line in done.metrics
        if line["kind"] == "island" and line["step"] >= FRAGMENTS // 2
    ]
    cpu, mean = [], []
    for name in NAMES:
        mine = [line for line in training if line["island"] == name]
        if len(mine) < MIN_REPORTS:
            raise support.RunError(f"{len(mine)} reports of {name}: more --steps")
        first, last = mine[0], mine[-1]
        made = last["step"] - first["step"]
        (samples,) = (s for (who, _), s in done.cpu.items() if who == name)
        inside = [s for s in samples if first["time"] <= s[0] <= last["time"]]
        share = (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
        seconds = last["time"] - first["time"]
        mean.append(seconds / made)
        cpu.append(share * seconds / made)
    takes = sum(
        record["kind"] == "island" and record["record"]["kind"] == "took"
        for record in done.tape
    )
    stepped = sum(island["step_seconds"] for island in islands.values())
    return {
        "median_s": statistics.fmean(
            island["median_step_seconds"] for island in islands.values()
        ),
        "mean_s": statistics.fmean(mean),
        "cpu_s": statistics.fmean(cpu),
        "stalled": sum(i["stalled_seconds"] for i in islands.values()) / stepped,
        "coordinator": done.cpu_share("coordinator"),
        "takes": takes / sum(island["steps"] for island in islands.values()),
    }


def alone_on_each_core(
    size: str, batch: int, steps: int, folder: Path
) -> dict[str, float]:
    """Return figures of the loop alone: means of two side by side."""
    files = [folder / name for name in NAMES]
    processes = []
    for core, file in zip(cores(), files, strict=False):
        command = ["taskset", "--cpu-list", str(core), sys.executable, __file__]
        command += ["--alone", size, str(file), "--steps", str(steps)]
        command += ["--batch", str(batch)]
        processes.append(subprocess.Popen(command))
    try:
        for process in processes:
            if process.wait(TIMEOUT_S):
                raise support.RunError("a loop alone failed")
    finally:
        for process in processes:
            process.kill()
    found = [json.loads(file.read_bytes()) for file in files if file.exists()]
    return {name: statistics.fmean(one[name] for one in found) for name in found[0]}


def alone_here(size: str, batch_size: int, steps: int) -> dict[str, float]:
    """Make the steps of an island without any other process."""
    import numpy as np

    from diloco_jax.data.loading import load_data
    from diloco_jax.data.reader import BatchReader
    from diloco_jax.island.device.build import build_trainer
    from diloco_jax.island.device.step import TrainState

    config = config_of(size, batch_size, steps)
    run = config.run
    _, trainer = build_trainer(run, config.islands[NAMES[0]])
    reader = BatchReader(load_data(run).index(run.seed), trainer.fields, SEQUENCE)
    params = trainer.first(run.seed)
    state, before = TrainState(params, trainer.init_inner(params)), None
    ends, cpu = [], []
    for step in range(steps):
        rows = np.arange(step * batch_size, (step + 1) * batch_size)
        batch = trainer.put_batch(reader.batch(rows))
        state, metrics = trainer.step(state, batch, run.inner.learning_rate)
        if before is not None:
            {name: float(value) for name, value in before.items()}
        before = metrics
        ends.append(time.monotonic())
        cpu.append(time.process_time())
    first = FRAGMENTS // 2
    made = steps - 1 - first
    gaps = [b - a for a, b in zip(ends[first:-1], ends[first + 1 :], strict=True)]
    return {
        "median_s": statistics.median(gaps),
        "mean_s": (ends[-1] - ends[first]) / made,
        "cpu_s": (cpu[-1] - cpu[first]) / made,
    }


if __name__ == "__main__":
    support.script(main)
