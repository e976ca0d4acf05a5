"""Unequal islands: do slow and stopped ones hold up the fast?

Question: islands with emulated step times 1 : 1 : 2 : 5 : 20 train one model. Are the
two fast ones as fast as without the others? Does every island's share of the merged
tokens equal its share of the computed ones? And with one of them stopped (SIGSTOP) for
15 s?

Three kinds of run take turns: A, the two fast islands alone; B, with the islands that
are 2, 5 and 20 times slower; S, as B with the one of factor 2 stopped. All last about
as long. The floor under every step is many times its compute, so that two cores are
not the limit; the CPU time of every process is sampled to show it.

Prediction: step times within 1 % (the floor hides what fits below it), mean gaps
within 2 %; shares equal but for rounding, since adoptions lose no step and the
flush at the end merges what is open.

![What unequal islands contribute](../../figures/unequal_islands.svg)

Command: `python benchmarks/unequal_islands.py`. Cost: about 17 minutes on two cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import support
import tape_checks

from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import preset

STEP_TIME_RATIO_MAX = 1.05
"""Fast islands' step time with the slow ones, over that without them."""
SHARE_ERROR_MAX = 0.02
"""Relative difference of an island's shares of merged and of computed tokens."""
FLOOR_OVER_COMPUTE_MIN = 4.0
"""Emulated step time over CPU seconds of a step, of the fast islands."""

FAST = ("fast-a", "fast-b")
FACTORS = {"fast-a": 1, "fast-b": 1, "x2": 2, "x5": 5, "x20": 20}
STOPPED, STOPPED_S = "x2", 15
BATCH, SEQUENCE = 2, 64
TIMEOUT_S = 600.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=80.0, help="of every run")
    parser.add_argument("--step-seconds", type=float, default=0.15)
    options = parser.parse_args()
    rows = []
    for repeat in range(options.repeats):
        for kind in "ABS":
            config = island_config(kind, options.seconds, options.step_seconds)
            label = f"run {kind}, {repeat + 1} of {options.repeats}"
            run = support.run_config(config, label, TIMEOUT_S)
            rows += measure(run, kind, repeat)
    ratios = step_time_ratios(rows)
    return support.write_results(
        options.out,
        "unequal_islands",
        __doc__,
        {
            "Step time of the fast islands, over that of the same repeat's A": [
                format_ratio(ratio) for ratio in ratios
            ],
            "Islands": [format_row(row) for row in rows],
        },
        bounds(rows, ratios),
        {"islands": rows, "ratios": ratios},
    )


def island_config(kind: str, seconds: float, step_seconds: float) -> Config:
    """Run A, B or S, with as many tokens as its islands compute in `seconds`."""
    names = FAST if kind == "A" else tuple(FACTORS)
    rate = sum(1 / FACTORS[name] for name in names) / step_seconds
    stop_at = round(seconds / 3 / (step_seconds * FACTORS[STOPPED]))
    fault = f"{STOPPED}@{stop_at}:pause{STOPPED_S}"
    run = RunConfig(
        model=preset("tiny"),
        data=DataConfig(validation_fraction=0.005),
        sync=SyncConfig(steps_per_cycle=12, fragments=6, quorum=2),
        sequence_length=SEQUENCE,
        total_tokens=round(seconds * rate) * BATCH * SEQUENCE,
    )
    islands = {
        name: IslandConfig(batch_size=BATCH, step_seconds=step_seconds * FACTORS[name])
        for name in names
    }
    placement = Placement(faults=(fault,) if kind == "S" else ())
    return Config(run=run, islands=islands, placement=placement).validate()


def measure(run: support.Run, kind: str, repeat: int) -> list[dict[str, Any]]:
    """One row per island."""
    summary = run.summary
    sizes = support.fragment_sizes(run.config)
    problems = tape_checks.ledger_problems(summary, run.tape, sizes)
    problems += tape_checks.version_problems(run.tape)
    merges_in = {
        name: sum(
            part["island"] == name
            for record in run.tape
            if record["kind"] == "merged" and not record["final"]
            for part in record["contributions"]
        )
        for name in summary["islands"]
    }
    shares = {
        name: run.cpu_share(name) for name in (*summary["islands"], "coordinator")
    }
    rows = []
    for name, island in summary["islands"].items():
        median = island["median_step_seconds"]
        gaps = island["step_seconds"] + island["stalled_seconds"]
        computed = island["tokens_computed"] / summary["tokens_computed"]
        merged = island["tokens_merged"] / summary["tokens_merged"]
        rows.append(
            {
                "run": kind,
                "repeat": repeat,
                "island": name,
                "steps": island["steps"],
                "median_step_seconds": median,
                "mean_step_seconds": gaps / island["steps"],
                "max_step_gap_seconds": island["max_step_gap_seconds"],
                "stalled_seconds": island["stalled_seconds"],
                "step_seconds": island["step_seconds"],
                "compute_seconds_per_step": shares[name] * median,
                "cores_used_by_run": sum(shares.values()),
                "tokens_computed": island["tokens_computed"],
                "tokens_merged": island["tokens_merged"],
                "share_computed": computed,
                "share_merged": merged,
                "fragment_merges": merges_in[name],
                "problems": problems,
            }
        )
    return rows


def step_time_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """B / A and S / A within each repeat, by fast island and kind of step time."""
    found = {(r["run"], r["repeat"], r["island"]): r for r in rows}
    ratios = []
    for kind in "BS":
        for name in FAST:
            for field in ("median_step_seconds", "mean_step_seconds"):
                values = [
                    row[field] / found["A", repeat, name][field]
                    for (run, repeat, island), row in found.items()
                    if (run, island) == (kind, name)
                ]
                ratios.append(
                    {"run": kind, "island": name, "of": field, "values": values}
                )
    return ratios


def bounds(
    rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]
) -> list[support.Check]:
    """The bounds of this benchmark against what was measured."""
    checks = []
    for kind in "BS":
        for field in ("median_step_seconds", "mean_step_seconds"):
            worst = max(
                statistics.median(ratio["values"])
                for ratio in ratios
                if (ratio["run"], ratio["of"]) == (kind, field)
            )
            what = f"fast islands' {field}, {kind} / A, slower island"
            checks.append(support.at_most(what, worst, STEP_TIME_RATIO_MAX, ".4f"))
    for kind in "ABS":
        chosen = [row for row in rows if row["run"] == kind]
        worst = max(abs(r["share_merged"] / r["share_computed"] - 1) for r in chosen)
        what = f"{kind}: shares of merged and computed tokens, worst island"
        checks.append(support.at_most(what, worst, SHARE_ERROR_MAX, ".5f"))
        problems = sorted({p for row in chosen for p in row["problems"]})
        checks.append(support.none_of(f"{kind}: ledger and versions", problems))
        floor = min(
            row["median_step_seconds"] / row["compute_seconds_per_step"]
            for row in chosen
            if row["island"] in FAST
        )
        what = f"{kind}: step time over CPU time of a step, fast islands"
        checks.append(support.at_least(what, floor, FLOOR_OVER_COMPUTE_MIN, ".1f"))
    return checks


def format_ratio(ratio: dict[str, Any]) -> dict[str, Any]:
    """A row for people."""
    values = ratio["values"]
    return {
        "run": ratio["run"],
        "island": ratio["island"],
        "of": ratio["of"],
        "median": f"{statistics.median(values):.4f}",
        "from": f"{min(values):.4f}",
        "to": f"{max(values):.4f}",
    }


def format_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row for people."""
    gap = row["max_step_gap_seconds"] / row["median_step_seconds"]
    return {
        "run": f"{row['run']}{row['repeat'] + 1}",
        "island": row["island"],
        "steps": row["steps"],
        "median step, s": f"{row['median_step_seconds']:.4f}",
        "mean, s": f"{row['mean_step_seconds']:.4f}",
        "longest gap, medians": f"{gap:.2f}",
        "stalled": f"{row['stalled_seconds'] / row['step_seconds']:.2%}",
        "CPU per step, s": f"{row['compute_seconds_per_step']:.4f}",
        "fragment merges": row["fragment_merges"],
        "share of computed": f"{row['share_computed']:.4%}",
        "share of merged": f"{row['share_merged']:.4%}",
        "cores used by run": f"{row['cores_used_by_run']:.2f}",
    }


if __name__ == "__main__":
    support.script(main)
