"""Islands of unlike meshes train one model, and one of them loses hosts.

Question: `configs/mixed_meshes.py` as it stands, only longer: islands of 2 hosts x 2
devices (fsdp), of 1 x 4 (fsdp 2 x tensor 2) and of 1. Host 1 of the first is killed
with SIGKILL, and host 0 of its next incarnation. Do the other islands notice? Is the
island merged again within a cycle, each time? Does the ledger balance? Are all islands,
which make steps in the same time, merged together?

Prediction: gaps below 2 medians (the restarted hosts compile on the same two cores),
the island merged after 2 to 6 steps of its own, nothing off by a token. Participation
above 0.9, though hosts of one island need two boundaries to agree on a take: the other
islands put theirs off as long. (0.50 for the island of two hosts before they did.)

Command: `python benchmarks/mixed_meshes.py`. Cost: about 6 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import support
import tape_checks

from diloco_jax.config import Config
from diloco_jax.config.loading import read_config

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "mixed_meshes.py"
KILLED = "two-hosts"
FAULTS = (f"{KILLED}/1@15:kill", f"{KILLED}/0#2@15:kill")
TIMEOUT_S = 900.0
PARTICIPATION_MIN = 0.9
GAP_MEDIANS_MAX = 3.0
"""Longest time between two steps, in medians."""


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=400_000)
    options = parser.parse_args()
    run = support.run_config(longer(options.tokens), CONFIG.name, TIMEOUT_S)
    rows = [row(name, island) for name, island in run.summary["islands"].items()]
    raw = {"summary": run.summary, "faults": FAULTS}
    return support.write_results(
        options.out, "mixed_meshes", __doc__, {"Islands": rows}, checks(run), raw
    )


def longer(tokens: int) -> Config:
    """The config, with that many tokens and two hosts killed."""
    config = read_config(str(CONFIG))
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, total_tokens=tokens),
        placement=dataclasses.replace(config.placement, faults=FAULTS),
    ).validate()


def checks(run: support.Run) -> list[support.Check]:
    """The bounds against what the run left."""
    islands, tape = run.summary["islands"], run.tape
    sizes = support.fragment_sizes(run.config)
    cycle = run.config.run.sync.cycle
    idle = [name for name, island in islands.items() if not island["tokens_merged"]]
    found = [
        support.none_of("islands of which nothing was merged", idle),
        support.none_of(
            "ledger", tape_checks.ledger_problems(run.summary, tape, sizes)
        ),
        support.none_of("versions", tape_checks.version_problems(tape)),
        support.at_least(f"joins of {KILLED}", islands[KILLED]["joins"], 3, "g"),
    ]
    for name, island in islands.items():
        share = island["participation"]
        what = f"{name}: share of the merges while it was there"
        found.append(support.at_least(what, share, PARTICIPATION_MIN, ".3f"))
        if name != KILLED:
            gap = island["max_step_gap_seconds"] / island["median_step_seconds"]
            what = f"{name}: longest gap, medians"
            found.append(support.at_most(what, gap, GAP_MEDIANS_MAX, ".2f"))
    for incarnation in (2, 3):
        steps = tape_checks.steps_to_first_merge(tape, KILLED, incarnation)
        what = f"own steps of {KILLED}, incarnation {incarnation}, until it is merged"
        found.append(support.at_most(what, steps, cycle, "g"))
    return found


def row(name: str, island: dict[str, Any]) -> dict[str, Any]:
    """Return an island's row of the table."""
    gap = island["max_step_gap_seconds"] / island["median_step_seconds"]
    return {
        "island": name,
        "steps": island["steps"],
        "joins": island["joins"],
        "median step, s": f"{island['median_step_seconds']:.4f}",
        "longest gap, medians": f"{gap:.2f}",
        "participation": f"{island['participation']:.3f}",
        "computed": island["tokens_computed"],
        "merged": island["tokens_merged"],
        "lost": sum(island["tokens_lost"].values()),
        "in flight": island["tokens_in_flight"],
    }


if __name__ == "__main__":
    support.script(main)
