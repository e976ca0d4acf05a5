"""The cost of a killed island and of a killed coordinator.

Question: three islands train; an island, the coordinator, or both are killed with
SIGKILL in mid-run and started again. Do the others notice? Does the island take part
again within a cycle? Is anything lost that should not be, or counted twice?

The ledger is checked against the tape: merged steps of an incarnation may neither
overlap nor come out of order, and what the summary says must follow from the decisions
on the tape. Versions may only grow, over the coordinator's crash too.

Prediction: longest gaps below 1.5 medians (islands train on leased data while the
coordinator is away, and a restarted process competes for two cores), no balance off by
a token, the killed island merged after 2 to 6 steps of its own.

Command: `python benchmarks/faults.py`. Cost: about 5 minutes on two cores.
"""

from __future__ import annotations

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

GAP_MEDIANS_MAX = 3.0
"""Longest time between two steps, in medians."""
STALLED_MAX = 0.05
"""Stalled seconds over seconds in steps."""
CYCLE_STEPS, FRAGMENTS = 12, 6
ISLANDS, VICTIM = ("a", "b", "c"), "b"
BATCH, SEQUENCE = 2, 64
TIMEOUT_S = 600.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="of every run")
    parser.add_argument("--step-seconds", type=float, default=0.25)
    options = parser.parse_args()
    steps = options.seconds / options.step_seconds
    island_kill = f"{VICTIM}@{round(steps / 5)}:kill"
    # As many merges as there are ticks until then.
    coordinator_kill = f"coordinator@{round(steps / 3 / CYCLE_STEPS * FRAGMENTS)}:kill"
    kinds = {
        "island killed": (island_kill,),
        "coordinator killed": (coordinator_kill,),
        "both killed": (island_kill, coordinator_kill),
    }
    rows: list[dict[str, Any]] = []
    checks: list[support.Check] = []
    for kind, faults in kinds.items():
        config = fault_config(faults, options.seconds, options.step_seconds)
        run = support.run_config(config, kind, TIMEOUT_S)
        rows += measure(run, kind)
        checks += bounds(run, kind)
    return support.write_results(
        options.out,
        "faults",
        __doc__,
        {"Islands": [format_row(row) for row in rows]},
        checks,
        {"islands": rows},
    )


def fault_config(
    faults: tuple[str, ...], seconds: float, step_seconds: float
) -> Config:
    """Return three islands of equal speed that train for about `seconds`."""
    steps = round(seconds / step_seconds)
    run = RunConfig(
        model=preset("tiny"),
        data=DataConfig(validation_fraction=0.005),
        sync=SyncConfig(steps_per_cycle=CYCLE_STEPS, fragments=FRAGMENTS, quorum=2),
        sequence_length=SEQUENCE,
        total_tokens=steps * len(ISLANDS) * BATCH * SEQUENCE,
    )
    island = IslandConfig(batch_size=BATCH, step_seconds=step_seconds)
    return Config(
        run=run,
        islands=dict.fromkeys(ISLANDS, island),
        placement=Placement(faults=faults),
    ).validate()


def bounds(run: support.Run, kind: str) -> list[support.Check]:
    """The bounds of this benchmark against what one run left."""
    islands, tape = run.summary["islands"], run.tape
    faults = run.config.placement.faults
    killed = [fault.partition("@")[0] for fault in faults]
    gaps = max(
        island["max_step_gap_seconds"] / island["median_step_seconds"]
        for name, island in islands.items()
        if name not in killed
    )
    stalled = max(i["stalled_seconds"] / i["step_seconds"] for i in islands.values())
    sizes = support.fragment_sizes(run.config)
    ledger = tape_checks.ledger_problems(run.summary, tape, sizes)
    crashes = killed.count("coordinator")
    checks = [
        support.at_most(f"{kind}: longest gap, medians", gaps, GAP_MEDIANS_MAX, ".2f"),
        support.at_most(f"{kind}: stalled share", stalled, STALLED_MAX, ".4f"),
        support.none_of(f"{kind}: ledger", ledger),
        support.none_of(f"{kind}: versions", tape_checks.version_problems(tape)),
        support.none_of(
            f"{kind}: faults that did not strike", missing_faults(run, killed, crashes)
        ),
    ]
    if VICTIM in killed:
        steps = tape_checks.steps_to_first_merge(tape, VICTIM, 2)
        what = f"{kind}: own steps of {VICTIM} until it is merged again"
        checks.append(support.at_most(what, steps, CYCLE_STEPS, "g"))
    return checks


def missing_faults(run: support.Run, killed: Sequence[str], crashes: int) -> list[str]:
    """Return the faults that the run was asked for but the tape does not show."""
    missing = []
    recovered = len(tape_checks.outage_seconds(run.tape))
    if recovered != crashes:
        missing.append(f"the coordinator came back {recovered} times, not {crashes}")
    for name, island in run.summary["islands"].items():
        joins = 1 + killed.count(name)
        if island["joins"] != joins:
            missing.append(f"{name} joined {island['joins']} times, not {joins}")
    return missing


def measure(run: support.Run, kind: str) -> list[dict[str, Any]]:
    """One row per island."""
    fields = (
        "steps",
        "median_step_seconds",
        "max_step_gap_seconds",
        "step_seconds",
        "stalled_seconds",
        "away_seconds",
        "joins",
        "participation",
        "tokens_computed",
        "tokens_merged",
        "tokens_lost",
        "tokens_in_flight",
    )
    return [
        {
            "run": kind,
            "island": name,
            **{field: island[field] for field in fields},
            "coordinator_outages_seconds": tape_checks.outage_seconds(run.tape),
            "goodput": run.summary["goodput"],
        }
        for name, island in run.summary["islands"].items()
    ]


def format_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row for people."""
    gap = row["max_step_gap_seconds"] / row["median_step_seconds"]
    outages = row["coordinator_outages_seconds"]
    return {
        "run": row["run"],
        "island": row["island"],
        "steps": row["steps"],
        "median step, s": f"{row['median_step_seconds']:.4f}",
        "longest gap, medians": f"{gap:.2f}",
        "stalled": f"{row['stalled_seconds'] / row['step_seconds']:.2%}",
        "joins": row["joins"],
        "away, s": f"{row['away_seconds']:.1f}",
        "computed": row["tokens_computed"],
        "merged": row["tokens_merged"],
        "lost": sum(row["tokens_lost"].values()),
        "in flight": row["tokens_in_flight"],
        "coordinator away, s": ", ".join(f"{s:.1f}" for s in outages) or "-",
        "goodput of run": f"{row['goodput']:.3f}",
    }


if __name__ == "__main__":
    support.script(main)
