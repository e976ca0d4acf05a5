"""A run under a random fault every few seconds.

Question: four islands and a coordinator train while every 20 s one of the five is
killed (two times of three) or stopped for 1 to 6 s, at random instants. What is left of
the goodput? Does memory, do file descriptors, threads or the disk grow? Are the books
exact at the end?

The *bound* on goodput is what would be left if a fault cost no more than the time for
which the struck island cannot train: from a kill until its first step after the
restart, and the length of a stop. Whatever else is lost counts against the run: steps
that no merge has, waits of the others, faults of the coordinator.

*Flat*: medians of the last third of the time over those of the first third, after a
warm-up, of processes that are older than SETTLED_S: a killed one begins anew, and has
its threads and its memory only from its second checkpoint on. Memory is a process's
own, without mapped files. The disk is what a restart reads; the records of a run (tape,
metrics) grow with its length, and their rate is in the table.

An hour gave a goodput of 0.949 on two cores of an AMD EPYC, and 0.943 on slower ones of
an Intel Xeon, where two thirds of what was lost were starts of 5.7 s, half of each
until a process was up. The hour below had other work beside it, at idle priority, on
one core from its eighth minute and on both from its twentieth: starts took 3.3 s
instead of 1.8.

Prediction: goodput within 2 % of the bound, and nothing grows.

Command: `python -m benchmarks.soak --minutes 60`. Cost: that, and half a minute. With
`--folder` the run's files stay there, where `benchmarks.dashboard` can be asked of it.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import support
import tape_checks
from flatness import FIELDS, Growth, UseOverTime, growths

from diloco_jax import run_files
from diloco_jax.chaos import measure
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.faults import COORDINATOR
from diloco_jax.models.presets import preset
from diloco_jax.observability.tape import read_lines

GOODPUT_MIN, OF_BOUND_MIN = 0.95, 0.95
FREQUENT_S = 20.0
"""Goodput is held to its own bound from this interval of faults on."""
FLAT_MAX = 0.05
ISLANDS = ("a", "b", "c", "d")
CYCLE_STEPS, FRAGMENTS = 12, 6
BATCH, SEQUENCE, STEP_SECONDS = 2, 64, 0.25
QUIET_S = 15.0
"""Seconds before the end in which nothing is struck any more."""
OFTEN = """The same with a fault every {:g} s

Question and method are the same. Only what is left over the bound has a bound of its
own, since starts and pauses alone take more than the twentieth that may be lost.

The same 117 faults gave 0.945 of the bound, a goodput of 0.845, where the
coordinator was started as it is now (no raw file): it was back 4.0 s after a kill, and
merged again after 6.0 s.

An island kept three connections that only its start had needed until the coordinator's
next start: it had 9 to 12 descriptors, and their growth was 0.333 a run before.
They are closed after three time budgets since. When processes counted from their 20th
second on, 22 minutes (261 strikes) had shown threads grow by 0.146: one has 36 until
its first checkpoint, 47 from then on.
"""
RETURNS, PART_S = "Returns of killed islands", 600.0
START_S = 300.0
LOOKS = 1000
"""Looks at the processes, at most two a second."""
HELD = (*FIELDS, "disk")
WARM_SHARE = 0.1
CHECKPOINT_S = 30.0
SETTLED_S = 2 * CHECKPOINT_S


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=20.0)
    parser.add_argument("--schedule-seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="new folder for the run, kept")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.every_s = 0.5, 8.0
    seconds = 60 * options.minutes
    flags = ["--every-s", options.every_s, "--for-s", seconds - QUIET_S]
    flags += ["--schedule-seed", options.schedule_seed]
    with tempfile.TemporaryDirectory(prefix="diloco-") as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        config = soak_config(seconds)
        print(f"{options.minutes:g} minutes, a fault every {options.every_s:g} s")
        with UseOverTime(folder / "run", max(0.5, seconds / LOOKS)) as use:
            run = support.run_in(
                config,
                folder,
                seconds * 2 + START_S,
                ["chaos", *map(str, flags)],
            )
        struck = list(read_lines(run.workdir / run_files.CHAOS))
    costs = cost_of(struck, run)
    since = costs.began + WARM_SHARE * (costs.ended - costs.began)
    settled_s = 2.0 if options.quick else SETTLED_S
    found = growths(use.uses, use.disk, since, settled_s)
    records = use.disk[-1].total - use.disk[-1].state
    checks = [
        *book_checks(run),
        support.at_least(
            "goodput over its bound", costs.goodput / costs.bound, OF_BOUND_MIN
        ),
    ]
    if options.every_s >= FREQUENT_S:
        checks.append(support.at_least("goodput", costs.goodput, GOODPUT_MIN))
    if not options.quick:
        checks += [flat_check(field, found) for field in HELD]
    facts = {
        "strikes": len(struck),
        "that met a process": sum(not strike["missed"] for strike in struck),
        "minutes": f"{(costs.ended - costs.began) / 60:.1f}",
        "goodput": f"{costs.goodput:.3f}",
        "bound": f"{costs.bound:.3f}",
        "away by kills, s": f"{costs.killed_s:.0f}",
        "stopped, s": f"{costs.stopped_s:.0f}",
        "merges": run.summary["merges"],
        "records, MB/h": f"{records / 1e6 / (costs.ended - costs.began) * 3600:.0f}",
    }
    outcomes = measure.measured(struck, run.tape, list(config.islands))
    head, *rows = measure.rows(outcomes)
    often = options.every_s < FREQUENT_S
    return support.deliver(
        options,
        "soak_often" if often else "soak",
        OFTEN.format(options.every_s) if often else __doc__,
        {
            "The run": [facts],
            "Strikes": [dict(zip(head, row, strict=True)) for row in rows],
            RETURNS: list(returns(outcomes, costs.began)),
            "From the first third to the last": list(growth_rows(found)),
        },
        checks,
        {
            "costs": dataclasses.asdict(costs),
            "struck": struck,
            "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
            "growth": [growth._asdict() for growth in found],
        },
    )


def soak_config(seconds: float) -> Config:
    """Return four islands of equal speed that train for about that long."""
    steps = round(seconds / STEP_SECONDS)
    run = RunConfig(
        model=preset("tiny"),
        data=DataConfig(validation_fraction=0.005),
        sync=SyncConfig(steps_per_cycle=CYCLE_STEPS, fragments=FRAGMENTS, quorum=2),
        sequence_length=SEQUENCE,
        total_tokens=steps * len(ISLANDS) * BATCH * SEQUENCE,
    )
    island = IslandConfig(batch_size=BATCH, step_seconds=STEP_SECONDS)
    return Config(
        run=run,
        islands=dict.fromkeys(ISLANDS, island),
        placement=Placement(restart_delay_s=0.2, checkpoint_every_s=CHECKPOINT_S),
    ).validate()


def book_checks(run: support.Run) -> list[support.Check]:
    """Return the checks that the books are exact, and that no version went back."""
    sizes = support.fragment_sizes(run.config)
    ledger = tape_checks.ledger_problems(run.summary, run.tape, sizes)
    return [
        support.none_of("ledger", ledger),
        support.none_of("versions", tape_checks.version_problems(run.tape)),
        support.none_of("rows of the data", tape_checks.row_problems(run.tape)),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Cost of faults, all islands together."""

    began: float
    """Unix seconds of the last first step."""
    ended: float
    """Unix seconds of the end of training."""
    killed_s: float
    """Seconds of all islands from a kill to their first step."""
    stopped_s: float
    goodput: float

    @property
    def bound(self) -> float:
        """Goodput if these seconds were all that is lost."""
        provisioned = len(ISLANDS) * (self.ended - self.began)
        return 1 - (self.killed_s + self.stopped_s) / provisioned


def cost_of(struck: Sequence[dict[str, Any]], run: support.Run) -> Costs:
    """Return the costs of a run. struck: lines of `chaos.jsonl`."""
    firsts = {name: list(first_steps(run.metrics, name)) for name in run.config.islands}
    began = max(steps[0] for steps in firsts.values())
    ended = next(r["time"] for r in run.tape if r["kind"] == "stopping")
    killed = stopped = 0.0
    for name in run.config.islands:
        own = [s for s in struck if name in s["who"] and name not in s["missed"]]
        back = began
        for number, strike in enumerate(own):
            at = strike["time"]
            if strike["kind"] == "stop":
                # A stop while it is away anyway costs nothing more.
                stopped += max(0.0, at + strike["seconds"] - max(at, back))
                continue
            later = (s["time"] for s in own[number + 1 :] if s["kind"] == "kill")
            again = min((t for t in firsts[name] if t > at), default=ended)
            until = min([again, ended, *later])
            killed += max(0.0, until - at)
            back = until
    return Costs(
        began=began,
        ended=ended,
        killed_s=killed,
        stopped_s=stopped,
        goodput=run.summary["goodput"],
    )


def first_steps(metrics: Sequence[dict[str, Any]], island: str) -> Iterator[float]:
    """Yield the unix seconds at which each life of an island began its first step, by
    the first line that has steps of it."""
    before = 0
    for line in metrics:
        if line["kind"] != "island" or line["island"] != island:
            continue
        if line["step"] and (line["step"] < before or not before):
            yield line["time"] - line["step"] * line["median_step_seconds"]
        before = line["step"]


def returns(
    outcomes: Sequence[measure.StrikeOutcome], began: float
) -> Iterator[dict[str, str]]:
    """Yield a row for each part of the run: how fast killed islands came back in it.
    began: unix seconds."""
    parts: dict[int, list[measure.StrikeOutcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        if outcome.kind == "kill" and outcome.who != COORDINATOR:
            parts[int((outcome.time - began) / PART_S)].append(outcome)
    for number, found in sorted(parts.items()):
        row = {
            "minutes": f"{number * PART_S / 60:g} to {(number + 1) * PART_S / 60:g}",
            "islands killed": str(len(found)),
        }
        for name in ("back_s", "merged_s"):
            known = [s for one in found if (s := getattr(one, name)) is not None]
            text = f"{statistics.fmean(known):.1f}" if known else "-"
            row[f"{name.replace('_', ' ')}, mean"] = text
        yield row


def flat_check(field: str, found: Sequence[Growth]) -> support.Check:
    """Return the check that nothing of this kind grew by more than FLAT_MAX."""
    worst = max((g.share for g in found if g.field == field), default=float("nan"))
    return support.at_most(f"growth of {field}", worst, FLAT_MAX, "+.3f")


def growth_rows(found: Sequence[Growth]) -> Iterator[dict[str, str]]:
    """Yield a row for each process and kind of use."""
    for growth in found:
        scale = 1e6 if growth.field in ("memory", "disk") else 1
        unit = ", MB" if scale > 1 else ""
        yield {
            "who": growth.name,
            "use": growth.field + unit,
            "first": f"{growth.first / scale:.1f}",
            "last": f"{growth.last / scale:.1f}",
            "growth": f"{growth.share:+.1%}",
        }


if __name__ == "__main__":
    support.script(main)
