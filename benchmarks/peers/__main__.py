"""This package beside torchft, given the same work in the same run.

Question: two and three replicas train one decoder; one is killed, one is four times
slower, or the process that coordinates is away for 8 s. How much training still counts,
how long do the others stand still, and what is lost?

**The work** is that of both: a byte decoder of the same tensors, batches of 2 x 64
tokens, 0.1 s for a step (slept where the arithmetic is faster, so that two cores are no
limit), AdamW, H = 12, four fragments, the mean of the deltas in f32, Nesterov with 0.7
and 0.9, merges from N - 1 replicas on. A supervisor starts a replica again 1 s after it
has ended. Faults strike at a quarter of the run. One run of each.

**torchft** is run "as in its examples" (heartbeats time out after 5 s, others after
10 s, `quorum_retries` = 0) and "tuned" for a small network (heartbeats time out after
1 s, 1000 retries). It waits for a fragment's all-reduce at once (`fragment_sync_delay`
= 0), since its delay would overwrite steps and saves nothing on this network. This
package has its defaults, with `time_budget_s` = 10.

**The columns.** A token is useful once it is in the common model, weighted by the
parameters of the fragments that it is in; torchft keeps no such books, so
`torchft_books.py` does. Rates are over the time in which all train, and relative to the
undisturbed run of the same system; none is compared across systems. "Possible" is what
is left if nobody waits for anybody; the time in which a killed replica starts again is
not taken off it. A gap is the longest time between two steps of a replica to which
nothing was done. Bytes are all that crossed the loopback device of a network of the
run's own. torchft's replicas begin by copying one of them, which loses their first
steps: most of the tokens that its undisturbed runs lose.

Command: `python -m benchmarks.peers`, which makes `.venv-peers` (1 GB) once.
Cost: about 18 minutes; with `--quick`, three replicas for 20 s each: 6 minutes, no
page. How the two differ otherwise: [comparison](../../comparison.md).
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
from pathlib import Path
from typing import Any

import support

from benchmarks.peers import ours
from benchmarks.peers.one import ROOT, SYSTEMS, run_alone
from benchmarks.peers.torchft_group import EXAMPLES, PATIENT
from benchmarks.peers.work import SCENARIOS, Outcome, Scenario, Work

SECONDS, QUICK_SECONDS = 40.0, 20.0
OUTAGE_S, QUICK_OUTAGE_S = 8.0, 4.0
USEFUL_MIN, GAP_MAX = 0.95, 2.0
VENV = ROOT / ".venv-peers"


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument(
        "--venv", type=Path, default=VENV, help="torchft's; made if it is missing"
    )
    parser.add_argument("--seconds", type=float, help="of training in each run")
    options = parser.parse_args()
    if not (options.venv / "bin" / "torchft_lighthouse").exists():
        script = str(Path(__file__).with_name("install.sh"))
        subprocess.run(["bash", script, str(options.venv)], check=True)
    outcomes = [
        run_alone(system, work, options.venv)
        for system, work in runs(options.quick, options.seconds)
    ]
    rows = [row_of(outcome, outcomes) for outcome in outcomes]
    tables = {f"{n} replicas": [r for r in rows if r["replicas"] == n] for n in (3, 2)}
    tables = {
        head: [{k: v for k, v in row.items() if k != "replicas"} for row in found]
        for head, found in tables.items()
        if found
    }
    versions = versions_in(options.venv)
    tables["Versions"] = [versions]
    told = [dataclasses.asdict(outcome) for outcome in outcomes]
    raw = {"peer": versions, "outcomes": told}
    checks = bounds(outcomes)
    return support.deliver(options, "peers", __doc__, tables, checks, raw)


def versions_in(venv: Path) -> dict[str, str]:
    """Return the versions of torchft and torch in a venv."""
    names = ("torchft", "torch")
    program = f"from importlib.metadata import version; print(*map(version, {names}))"
    said = subprocess.run(
        [venv / "bin" / "python", "-c", program],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(zip(names, said.stdout.split(), strict=True))


def runs(quick: bool, seconds: float | None) -> list[tuple[str, Work]]:
    """Return what is run, in its order: each scenario with all systems in a row."""
    found = []
    length = seconds or (QUICK_SECONDS if quick else SECONDS)
    outage = QUICK_OUTAGE_S if quick else OUTAGE_S
    for replicas in (3,) if quick else (3, 2):
        for scenario in SCENARIOS:
            work = Work(
                scenario=scenario, replicas=replicas, seconds=length, outage_s=outage
            )
            systems = systems_of(scenario, replicas)
            found += [(system, work) for system in systems]
    return found


def systems_of(scenario: Scenario, replicas: int) -> tuple[str, ...]:
    """Return the systems that are run: settings of torchft that make no difference are
    left out."""
    if replicas == 3 and scenario in ("killed", "coordinator lost"):
        return SYSTEMS
    return tuple(system for system in SYSTEMS if system != EXAMPLES.name)


def relative(outcome: Outcome, outcomes: list[Outcome]) -> float:
    """Return the useful tokens per second over those of the undisturbed run."""
    system = PATIENT.name if outcome.system == EXAMPLES.name else outcome.system
    (base,) = (
        each
        for each in outcomes
        if each.system == system
        and each.replicas == outcome.replicas
        and each.scenario == "undisturbed"
    )
    return outcome.useful_per_second / base.useful_per_second


def row_of(outcome: Outcome, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return an outcome for people."""
    whole = next(
        each.capacity
        for each in outcomes
        if each.replicas == outcome.replicas and each.scenario == "undisturbed"
    )
    return {
        "replicas": outcome.replicas,
        "scenario": outcome.scenario,
        "system": outcome.system,
        "useful tokens/s, relative": f"{relative(outcome, outcomes):.2f}",
        "possible": f"{outcome.capacity / whole:.2f}",
        "longest gap of the others, steps": f"{outcome.longest_gap_steps:.1f}",
        "went on": "yes" if outcome.went_on else "**no**",
        "others' processes that ended": outcome.ended,
        "tokens lost": f"{outcome.tokens_lost:,.0f}",
        "bytes per useful token": "not measured"
        if math.isnan(outcome.bytes_per_token)
        else f"{outcome.bytes_per_token:,.0f}",
    }


def bounds(outcomes: list[Outcome]) -> list[support.Check]:
    """Return what this package promises, against what was measured, and that the work
    was the same. Gaps are compared with those of the undisturbed run, which are the
    machine's doing."""
    own = [each for each in outcomes if each.system == ours.SYSTEM]
    quiet = {e.replicas: e for e in own if e.scenario == "undisturbed"}
    sizes = {each.parameters for each in outcomes}
    checks = [support.at_most("sizes of the model by system", len(sizes), 1, "d")]
    for each in own:
        what = f"{each.replicas} replicas, {each.scenario}"
        held = relative(each, outcomes) / (
            each.capacity / quiet[each.replicas].capacity
        )
        if each.scenario in ("slow", "coordinator lost"):
            what_held = f"{what}: useful over possible"
            checks.append(support.at_least(what_held, held, USEFUL_MIN, ".2f"))
        if each.scenario != "undisturbed":
            gap = each.longest_gap_steps / quiet[each.replicas].longest_gap_steps
            what_gap = f"{what}: longest gap over the undisturbed run's"
            checks.append(support.at_most(what_gap, gap, GAP_MAX, ".2f"))
    return checks


if __name__ == "__main__":
    support.script(main)
