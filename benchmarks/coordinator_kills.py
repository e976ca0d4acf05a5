"""A coordinator that is killed again and again at random instants.

Question: two islands train, and SIGKILL meets the coordinator again and again, one to
six seconds apart: while it starts, recovers, merges, writes or waits. Does it come back
each time? Does a version ever go back, is anything merged twice?

A kill that meets the coordinator before it has recovered from the one before is one of
the instants, too; *recovered* counts those after which it recovered before the next one
came, of which 100 are wanted. A kill that leaves it 4 s and more has to be one of them.
Versions are those of its own merges and recoveries, and those that islands adopted.

Prediction: it recovers within 3 s, so from 3 of 5 kills and more, and from all that
leave it 4 s; books and versions are exact.

Command: `python -m benchmarks.coordinator_kills`. Cost: 4 s a kill.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import soak
import support
import tape_checks

from diloco_jax import run_files
from diloco_jax.chaos.schedule import Strike, write_schedule
from diloco_jax.config import Config
from diloco_jax.faults import COORDINATOR
from diloco_jax.observability.tape import read_lines

GAP_S = (1.0, 6.0)
TIME_S = 4.0
"""Seconds after a kill within which it has to recover."""
RECOVERED_MIN = 100
TAIL_S = 15.0
"""Seconds of training after the last kill."""
OUTAGE_S = 120.0
"""Data that islands hold, in seconds: several kills may come before a recovery."""


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--kills", type=int, default=180)
    parser.add_argument("--schedule-seed", type=int, default=0)
    options = parser.parse_args()
    wanted = RECOVERED_MIN
    if options.quick:
        options.kills, wanted = 5, 1
    strikes = random_kills(options.kills, options.schedule_seed)
    with tempfile.TemporaryDirectory(prefix="diloco-") as name:
        folder = Path(name)
        schedule = folder / "schedule"
        write_schedule(map(str, strikes), schedule)
        config = kills_config(strikes[-1].at_s + TAIL_S)
        print(f"{options.kills} kills in {strikes[-1].at_s:.0f} s", file=sys.stderr)
        run = support.run_in(
            config,
            folder,
            strikes[-1].at_s * 2 + soak.START_S,
            ["chaos", "--schedule", str(schedule)],
        )
        struck = list(read_lines(run.workdir / run_files.CHAOS))
    met = [strike["time"] for strike in struck if not strike["missed"]]
    back = [r["time"] for r in run.tape if r["kind"] == "recovered"]
    spans = list(itertools.pairwise([*met, float("inf")]))
    recovered = [any(a < r <= b for r in back) for a, b in spans]
    late = [
        f"the kill at {a - met[0]:.1f} s, {b - a:.1f} s before the next"
        for (a, b), well in zip(spans, recovered, strict=True)
        if not well and b - a >= TIME_S
    ]
    facts = {
        "kills": len(met),
        "recovered": sum(recovered),
        "killed before it had recovered": len(met) - sum(recovered),
        "merges": run.summary["merges"],
        "goodput": f"{run.summary['goodput']:.3f}",
        "longest silence of the tape, s": f"{longest_silence(run.tape):.1f}",
    }
    checks = [
        support.at_least("kills that met it", len(met), options.kills, "d"),
        support.at_least("recovered", sum(recovered), wanted, "d"),
        support.none_of(f"not recovered in {TIME_S:g} s", late),
        *soak.book_checks(run),
    ]
    return support.deliver(
        options,
        "coordinator_kills",
        __doc__,
        {"The run": [facts]},
        checks,
        {"killed": met, "recovered": back, "facts": facts},
    )


def random_kills(count: int, seed: int) -> list[Strike]:
    """Return kills of the coordinator at random times."""
    numbers = random.Random(seed)
    gaps = [round(numbers.uniform(*GAP_S), 3) for _ in range(count)]
    return [
        Strike(at_s=round(at, 3), who=(COORDINATOR,), kind="kill")
        for at in itertools.accumulate(gaps)
    ]


def kills_config(seconds: float) -> Config:
    """Return two islands that train for about that long."""
    config = soak.soak_config(seconds)
    islands = dict(itertools.islice(config.islands.items(), 2))
    share = len(islands) / len(config.islands)
    total = round(config.run.total_tokens * share)
    return dataclasses.replace(
        config,
        islands=islands,
        run=dataclasses.replace(config.run, total_tokens=total),
        placement=dataclasses.replace(
            config.placement, outage_budget_s=OUTAGE_S, snapshot_every_s=10.0
        ),
    ).validate()


def longest_silence(tape: list[dict[str, Any]]) -> float:
    """Return the longest time between a line and a recovery after it, in seconds."""
    return max(tape_checks.outage_seconds(tape), default=0.0)


if __name__ == "__main__":
    support.script(main)
