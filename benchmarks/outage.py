"""A coordinator that is away for ten minutes.

Question: four islands train while their coordinator is away once, for ten minutes, and
then starts again from its disk. Does any island wait, or lose a step? What does the
outage cost in loss, at equal tokens? Islands hold data for OUTAGE_BUDGET_S.

*Emulated*: the real protocol and the real arithmetic in virtual time, three seeds, with
the outage and without it; differences are paired by seed. *Real*: processes of this
machine; the coordinator is stopped for so long, as when its machine hangs, and then
killed, and `diloco run` starts it again. Nobody reaches it meanwhile.

Prediction: no step waits and none is lost. Islands drift apart for 1,500 steps, so the
first merges after it are of deltas 125 times as long in steps as others; at the end of
the run, 750 steps later, the loss is within 2 % of that without an outage.

Command: `python -m benchmarks.outage`. Cost: half an hour on two cores.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import soak
import support
from loss_under_faults import RATE

from diloco_jax import run_files
from diloco_jax.cluster.cluster import LocalCluster
from diloco_jax.config import Config
from diloco_jax.config.resolving import LONG
from diloco_jax.faults import COORDINATOR
from diloco_jax.observability.tape import read_tape
from diloco_jax.simulation.emulation_options import EmulationOptions

OUTAGE_S, OUTAGE_BUDGET_S = 600.0, 900.0
LOSS_MAX = 2.0
"""Percent by which the loss may be above that without an outage: the prediction."""
BESIDE = 0.5
"""Length of the run before the outage, and after it, as a share of the outage."""
STEP_SECONDS = 0.4
SEEDS = 3
SHARE = 0.9
"""Share of the steps, at its speed before, that an island makes while it is away."""
SETTLED_S = 10.0
"""Time after its return in which islands have reported their steps."""


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    seeds, outage_s = (1, 20.0) if options.quick else (SEEDS, OUTAGE_S)
    os.environ.update(NPROC="1", JAX_PLATFORMS="cpu")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, spawn) as pool:
        real = pool.submit(processes, outage_s)
        pairs = [
            [pool.submit(emulated, seed, outage_s, away) for away in (False, True)]
            for seed in range(seeds)
        ]
        found = [[run.result() for run in pair] for pair in pairs]
        run = real.result()
    over = [100 * (away["loss"] / usual["loss"] - 1) for usual, away in found]
    checks = [
        support.at_most("emulated: tokens lost", most_lost(found), 0, "d"),
        support.at_most(
            "emulated: loss over that without an outage, mean, %",
            statistics.mean(over),
            LOSS_MAX,
            "+.2f",
        ),
        support.at_most("real: tokens lost", run["lost"], 0, "d"),
        support.none_of("real: islands that waited", run["idle"]),
    ]
    return support.deliver(
        options,
        "outage",
        __doc__,
        {
            "Emulated": [
                {
                    "seed": seed,
                    "loss": f"{usual['loss']:.4f}",
                    "with the outage": f"{away['loss']:.4f}",
                    "over it": f"{percent:+.2f} %",
                    "merges": usual["merges"],
                    "with it": away["merges"],
                    "tokens lost": away["lost"],
                }
                for seed, ((usual, away), percent) in enumerate(
                    zip(found, over, strict=True)
                )
            ],
            "Real": [run["row"]],
        },
        checks,
        {"emulated": found, "real": run, "outage_s": outage_s},
    )


def config_of(outage_s: float, seed: int = 0, faults: tuple[str, ...] = ()) -> Config:
    """Return a run that lasts as long before and after its outage."""
    config = soak.soak_config(60.0)
    seconds = (1 + 2 * BESIDE) * outage_s
    steps = round(seconds / STEP_SECONDS) * len(config.islands)
    inner = dataclasses.replace(config.run.inner, learning_rate=RATE, rewarm_steps=0)
    run = dataclasses.replace(
        config.run,
        seed=seed,
        inner=inner,
        total_tokens=steps * soak.BATCH * soak.SEQUENCE,
    )
    islands = {
        name: dataclasses.replace(island, step_seconds=STEP_SECONDS)
        for name, island in config.islands.items()
    }
    placement = dataclasses.replace(
        config.placement, faults=faults, outage_budget_s=OUTAGE_BUDGET_S
    )
    return Config(run=run, islands=islands, placement=placement).validate()


def emulated(seed: int, outage_s: float, away: bool) -> dict[str, Any]:
    """Return what an emulation came to, with the outage or without it."""
    from diloco_jax import compilation, emulate

    compilation.use_cache(compilation.of_user())
    steps = BESIDE * outage_s / STEP_SECONDS
    merges = round(steps * soak.FRAGMENTS / soak.CYCLE_STEPS)
    faults = (f"{COORDINATOR}@{merges}:pause{outage_s:g}",) if away else ()
    config = config_of(outage_s, seed, faults)
    overlap_s = LONG.overlap * STEP_SECONDS
    options = EmulationOptions(
        merge_seconds=overlap_s / 8, step_spread=0.1, chance_seed=seed
    )
    summary = emulate(config, options=options).summary
    return {
        "loss": summary["eval_loss"],
        "merges": summary["merges"],
        "lost": sum(summary["tokens_lost"].values()),
        "seconds": summary["wall_seconds"],
    }


def most_lost(found: list[list[dict[str, Any]]]) -> int:
    """Return the most tokens that a run lost."""
    return max(int(run["lost"]) for pair in found for run in pair)


def processes(outage_s: float) -> dict[str, Any]:
    """Return what a run of real processes came to."""
    config = config_of(outage_s)
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        workdir = Path(folder) / "run"
        with LocalCluster(config, workdir) as cluster:
            cluster.until(lambda status: status["merges"] > 0, soak.START_S)
            time.sleep(SETTLED_S)
            first, first_at = steps_of(cluster.status()), time.monotonic()
            time.sleep(BESIDE * outage_s)
            before, began = steps_of(cluster.status()), time.monotonic()
            cluster.coordinator.pause()
            time.sleep(outage_s)
            cluster.coordinator.kill()
            cluster.until(lambda status: bool(status["islands"]), soak.START_S)
            time.sleep(SETTLED_S)
            after, ended = steps_of(cluster.status()), time.monotonic()
            summary = cluster.wait(4 * outage_s + soak.START_S)
        tape = list(read_tape(cluster.workdir / run_files.TAPE))
    merged = [line["time"] for line in tape if line["kind"] == "merged"]
    gap = max(b - a for a, b in itertools.pairwise(merged))
    times = (ended - began) / (began - first_at)
    usual = {name: times * (before[name] - first[name]) for name in before}
    made = {name: after[name] - before[name] for name in after}
    lost = sum(summary["tokens_lost"].values())
    return {
        "idle": [
            f"{name}: {steps} steps of {usual[name]:.0f}"
            for name, steps in made.items()
            if steps < SHARE * usual[name]
        ],
        "steps_while_away": made,
        "lost": lost,
        "loss": summary["eval_loss"],
        "row": {
            "steps while it was away": ", ".join(f"{n}: {s}" for n, s in made.items()),
            "at the speed before": round(statistics.fmean(usual.values())),
            "longest time between merges, s": f"{gap:.1f}",
            "goodput": f"{summary['goodput']:.3f}",
            "tokens lost": lost,
            "loss": f"{summary['eval_loss']:.4f}",
        },
    }


def steps_of(status: dict[str, Any]) -> dict[str, int]:
    """Return the steps that each island has made."""
    return {name: island["steps"] for name, island in status["islands"].items()}


if __name__ == "__main__":
    support.script(main)
