"""The cost of checkpoints to an island.

Question: how long does a checkpoint hold up the train loop, and how long is it in
writing? One island trains twice on as many tokens, with and without checkpoints, with
a step time that leaves its cores some slack.

Stalled seconds are those that the loop spent outside steps and evaluation. A checkpoint
has three arrays per parameter: two moments and the residual, in f32.

Prediction: tens of milliseconds per checkpoint for a few million parameters, since the
loop only has copies begun; no gap between two steps above twice the median.

Command: `python benchmarks/checkpoints.py`. Cost: about 5 minutes on two cores.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import support

from diloco_jax import run_files
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import PRESETS, preset

STALL_MAX_S = 0.1
"""Stalled seconds per checkpoint, above the loop's stall without checkpoints."""
STALLED_MAX = 0.05
"""Share of step time, as for every run."""
ARRAYS_PER_PARAMETER = 3
BATCH, SEQUENCE = 2, 64
TIMEOUT_S = 900.0
WRITTEN = re.compile(r"checkpoint \d+, after step \d+, is written \((?P<s>[\d.]+) s\)")


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--presets", nargs="+", default=["0.3m", "2m"], choices=PRESETS)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--step-seconds", type=float, default=0.4)
    parser.add_argument("--every-s", type=float, default=4.0)
    options = parser.parse_args()
    results, checks = [], []
    for name in options.presets:
        plain, saving = (
            measure(name, options.steps, options.step_seconds, every_s)
            for every_s in (0.0, options.every_s)
        )
        extra_s = saving["stalled_seconds"] - plain["stalled_seconds"]
        per_checkpoint_s = max(0.0, extra_s) / max(1, saving["checkpoints"])
        share = saving["stalled_seconds"] / saving["step_seconds"]
        results.append({**saving, "plain": plain, "stall_s": per_checkpoint_s})
        checks += [
            support.at_least(f"{name}: checkpoints", saving["checkpoints"], 1, "d"),
            support.at_most(
                f"{name}: seconds stalled per checkpoint", per_checkpoint_s, STALL_MAX_S
            ),
            support.at_most(f"{name}: share of time stalled", share, STALLED_MAX),
        ]
    return support.write_results(
        options.out,
        "checkpoints",
        __doc__,
        {"Runs": [row(result) for result in results]},
        checks,
        {"results": results},
    )


def measure(
    name: str, steps: int, step_seconds: float, every_s: float
) -> dict[str, Any]:
    """Measure one run; without checkpoints if `every_s` is 0."""
    island = IslandConfig(batch_size=BATCH, step_seconds=step_seconds)
    config = Config(
        run=RunConfig(
            model=preset(name),
            data=DataConfig(validation_fraction=0.005),
            sync=SyncConfig(steps_per_cycle=12, fragments=6),
            sequence_length=SEQUENCE,
            total_tokens=steps * BATCH * SEQUENCE,
        ),
        islands={"a": island},
        placement=Placement(checkpoint_every_s=every_s),
    ).validate()
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        run = support.run_in(config, Path(folder), TIMEOUT_S)
        log = (Path(folder) / "run" / run_files.LOGS / "a.log").read_text()
    written = [float(match["s"]) for match in WRITTEN.finditer(log)]
    fields = ("stalled_seconds", "step_seconds", "max_step_gap_seconds")
    measured: dict[str, Any] = {f: run.summary["islands"]["a"][f] for f in fields}
    return {
        "preset": name,
        "parameters": sum(support.fragment_sizes(config)),
        "median_step_seconds": run.summary["islands"]["a"]["median_step_seconds"],
        "checkpoints": len(written),
        "write_seconds": statistics.median(written) if written else 0.0,
        **measured,
    }


def row(result: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the table."""
    plain, parameters = result["plain"], result["parameters"]
    return {
        "parameters": f"{parameters:,}",
        "MB each": f"{ARRAYS_PER_PARAMETER * 4 * parameters / 1e6:.1f}",
        "checkpoints": result["checkpoints"],
        "seconds stalled": f"{result['stalled_seconds']:.3f}",
        "without": f"{plain['stalled_seconds']:.3f}",
        "longest gap, medians": (
            f"{result['max_step_gap_seconds'] / result['median_step_seconds']:.2f}"
        ),
        "without ": (
            f"{plain['max_step_gap_seconds'] / plain['median_step_seconds']:.2f}"
        ),
        "seconds to write": f"{result['write_seconds']:.2f}",
    }


if __name__ == "__main__":
    support.script(main)
