"""Faults by phase: what each does to the others, and what it costs.

Question: three islands train, and one of CASES strikes while nothing is asked for
(idle), while a delta is on its way (transfer), or while the coordinator merges (merge).
Do the others train on? Is more lost than the victim's own steps since its last merge?
Is the victim merged again? Is anything merged twice?

Each cell is a run of its own by `diloco chaos`, of real processes: deltas take a third
of a second on their links, and merges a while by `slow_mean.py`, so that both can be
met. *Gap* is the longest time between two steps of islands whose process was not
struck, over the median step, after the machine's own hiccups were taken off: the
longest time by which a thread that only sleeps overslept. *Lost* are tokens. *Merge
after own steps* is the number of steps of a killed island's last life in its first
delta that was merged; a cycle has 12. *Detected*, *back* and *merged* are seconds from
the strike.

Prediction: gaps below two medians, and nothing lost but the open steps of what was
killed.

Found by it, and mended: all islands killed in a merge had 13 or 14 own steps on two
cores. One that took late missed its first merge by a few hundredths of a second, and
its next was one of the other fragment; docs/design/grace.md has what changed.

Command: `python -m benchmarks.fault_matrix`; `--only` chooses cells, `--missing` those
that were not run or had a problem, and figures of others stay as they were. Results are
written as they come; the table has the cells that were run. Cost: half a minute a cell
on two cores.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import slow_mean
import support
import tape_checks
from fault_cases import AT_A_STEP, CASES, CELLS, FRAGMENTS, ISLANDS, LEASE_S, Case
from machine import Stall
from phases import LOOK_S, Phase, Recovery, ending, open_ticks
from rich.console import Console

from diloco_jax import run_files
from diloco_jax.chaos import command
from diloco_jax.chaos.schedule import ChaosOptions
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    ModelConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.files import json_number
from diloco_jax.models.presets import preset
from diloco_jax.observability.tape import read_lines, read_tape
from diloco_jax.workdir import read_summary

CYCLE_STEPS, STEP_SECONDS = 12, 0.2
BATCH, SEQUENCE = 2, 16
MOST_STEPS = 10_000
"""More than any cell needs: a run is ended once all have recovered."""
SPOILED_STEPS = 2 * CYCLE_STEPS
"""Most steps that an island loses which is not fit: until each fragment was refused."""
TRANSFER_S = 0.3
GAP_MEDIANS_MAX = 2.0
NAME = "fault_matrix"


def main() -> int:
    """Run it; return 1 if a cell has a problem."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--only", default="", help="part of the name of a cell")
    parser.add_argument("--missing", action="store_true", help="cells without success")
    options = parser.parse_args()
    raw = options.out / "raw" / f"{NAME}.json"
    cells: dict[str, Any] = {}
    if raw.exists() and (options.only or options.missing):
        cells = json.loads(raw.read_bytes())["cells"]
    chosen = [
        (case, phase)
        for case in CASES
        for phase in case.phases
        if options.only in cell_name(case, phase)
        and not (options.missing and succeeded(cells.get(cell_name(case, phase))))
    ]
    failed = 0
    for case, phase in chosen[: 1 if options.quick else None]:
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
            cell = run_cell(case, phase, Path(folder))
        name = cell_name(case, phase)
        cells[name] = with_earlier(cells.get(name, {}), dataclasses.asdict(cell))
        told = "; ".join(cell.problems) or "holds"
        print(f"{time.strftime('%H:%M:%S')} {case.name}, {phase}: {told}", flush=True)
        failed = support.deliver(
            options,
            NAME,
            __doc__,
            {f"Cells: {len(cells)} of {CELLS}": rows(cells)},
            checks(cells),
            {"cells": cells},
        )
    return failed


def with_earlier(before: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Return a cell with its date, and the problems that it had in runs before."""
    earlier = [*before.get("earlier", ()), *before.get("problems", ())]
    return {**cell, "date": time.strftime("%Y-%m-%d"), "earlier": earlier}


def succeeded(cell: dict[str, Any] | None) -> bool:
    """Tell whether a cell was run and had no problem."""
    return cell is not None and not cell["problems"]


def cell_name(case: Case, phase: str) -> str:
    """Return the name of a cell, for `--only`."""
    return f"{case.name}: {phase}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Result of one run. Times in seconds."""

    strikes: tuple[str, ...]
    problems: tuple[str, ...]
    gap_medians: float
    """Longest gap of islands whose process was not struck, without hiccups; 0 if there
    is none."""
    hiccup_s: float
    tokens_lost: int
    own_steps: float | None
    """Steps of killed islands until they were merged again, the most; 0 if none was
    killed, None if one was not merged."""
    detected_s: float | None
    back_s: float | None
    merged_s: float | None
    """The latest of all that were struck; None: nobody noticed."""


def run_cell(
    case: Case,
    phase: str,
    folder: Path,
    model: ModelConfig | None = None,
) -> Cell:
    """Run one cell in a folder, and measure it. Call it from the main thread: SIGINT
    ends the run."""
    config = cell_config(folder, model or preset("tiny"))
    merging = folder / "merging"
    schedule = folder / "schedule"
    schedule.write_text("".join(f"{text}\n" for text in case.texts))
    options = ChaosOptions(
        schedule=str(schedule),
        link_bytes_per_s=max(support.fragment_sizes(config)) / TRANSFER_S,
    )
    moment = Phase(phase, case.victim, ISLANDS, merging)
    said = io.StringIO()
    with (
        Stall() as stall,
        ending(folder / "run", Recovery(case)) as ended,
        mock.patch.dict(os.environ, {slow_mean.FILE: str(merging)}),
    ):
        console = Console(file=said, width=200)
        _, told = command.run(
            config, "cell.py", console, options, moment=moment, look_s=LOOK_S
        )
    workdir = folder / "run"
    if not (ended.is_set() and read_summary(workdir)):
        # The run takes a signal to this process for one to itself.
        raise support.RunError(f"cut off, or no summary: {said.getvalue()[-2000:]}")
    return measured(case, phase, config, workdir, told, stall.longest_s)


def cell_config(folder: Path, model: ModelConfig) -> Config:
    """Return the config of a cell, and write its text."""
    text = folder / "text"
    text.mkdir()
    for index in range(20):
        words = (str(n * n % 97) for n in range(index, index + 2000))
        (text / f"{index}.txt").write_text(" ".join(words))
    run = RunConfig(
        model=model,
        data=DataConfig(paths=(str(text),), validation_fraction=0.1),
        sync=SyncConfig(
            steps_per_cycle=CYCLE_STEPS,
            fragments=FRAGMENTS,
            quorum=2,
            merge=f"{slow_mean.__file__}:slow_mean",
        ),
        sequence_length=SEQUENCE,
        total_tokens=MOST_STEPS * len(ISLANDS) * BATCH * SEQUENCE,
    )
    island = IslandConfig(batch_size=BATCH, step_seconds=STEP_SECONDS)
    return Config(
        run=run,
        islands=dict.fromkeys(ISLANDS, island),
        placement=Placement(
            workdir=str(folder / "run"),
            time_budget_s=LEASE_S,
            restart_delay_s=0.2,
            snapshot_every_s=4.0,
            checkpoint_every_s=1.0,
        ),
    ).validate()


def measured(
    case: Case,
    phase: str,
    config: Config,
    workdir: Path,
    told: dict[str, Any],
    hiccup_s: float,
) -> Cell:
    """Return what a finished cell shows. told: the report of `diloco chaos`."""
    summary = read_summary(workdir)
    tape = list(read_tape(workdir / run_files.TAPE))
    islands: dict[str, Any] = summary["islands"]
    spared = set(islands) - {*case.struck("kill", "stop", "slow"), *case.spoiled}
    gaps = [
        (islands[n]["max_step_gap_seconds"] - hiccup_s)
        / islands[n]["median_step_seconds"]
        for n in spared
    ]
    steps = [
        tape_checks.steps_to_first_merge(tape, n, last_life(tape, n))
        for n in case.struck("kill")
    ]
    struck = list(read_lines(workdir / run_files.CHAOS)) if case.strikes else []
    over = max((s["time"] + s["seconds"] for s in struck), default=0.0)
    sizes = support.fragment_sizes(config)
    books = tape_checks.ledger_problems(summary, tape, sizes)
    return Cell(
        strikes=case.texts,
        gap_medians=max(gaps, default=0.0),
        hiccup_s=hiccup_s,
        tokens_lost=sum(n for i in islands.values() for n in lost_of(i).values()),
        own_steps=json_number(max(steps, default=0.0)),
        detected_s=latest(told["outcomes"], "detected_s"),
        back_s=latest(told["outcomes"], "back_s"),
        merged_s=latest(told["outcomes"], "merged_s"),
        problems=(
            *(
                f"longest gap {gap:.2f} medians beyond {hiccup_s:.2f} s of hiccups"
                for gap in gaps
                if gap > GAP_MEDIANS_MAX
            ),
            *(
                f"merged again after {own:g} steps of its own"
                for own in steps
                if own > CYCLE_STEPS
            ),
            *phase_problems(phase, tape, struck),
            *loss_problems(case, summary, tape),
            *(
                f"{name} was not merged again"
                for name in islands
                if not merged_after(tape, name, over)
            ),
            # The run was ended within its steps, and may have some of them in flight.
            *(line for line in books if "still in flight" not in line),
            *tape_checks.version_problems(tape),
            *tape_checks.row_problems(tape),
        ),
    )


def phase_problems(
    phase: str, tape: list[dict[str, Any]], struck: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yield what is wrong with the strikes themselves."""
    if phase == AT_A_STEP:
        return
    if not struck:
        yield "nothing was struck"
        return
    for strike in struck:
        if strike["missed"]:
            yield f"{strike['strike']} met no process of {strike['missed']}"
    if (phase == "idle") == bool(open_ticks(tape, struck[0]["time"])):
        yield f"{struck[0]['strike']} did not strike in the phase {phase}"


def loss_problems(
    case: Case, summary: dict[str, Any], tape: list[dict[str, Any]]
) -> Iterator[str]:
    """Yield losses of islands that were neither killed nor spoiled, and those of others
    that are more than their steps since the fragment's last merge."""
    may_lose = (*case.struck("kill"), *case.spoiled)
    for name, island in summary["islands"].items():
        if name not in may_lose and (lost := lost_of(island)):
            yield f"{name} was not killed and lost {lost}"
    for name in case.spoiled:
        lost = lost_of(summary["islands"][name])
        if not set(lost) & {"non_finite", "out_of_bounds"}:
            yield f"{name} was not refused, and lost {lost}"
        if sum(lost.values()) > SPOILED_STEPS * BATCH * SEQUENCE:
            yield f"{name} lost {lost}, more than {SPOILED_STEPS} steps"
    for number, record in enumerate(tape):
        if record["kind"] != "left":
            continue
        for fragment, lost in enumerate(record["lost_tokens_by_fragment"]):
            ends = [
                part["end"]
                for merge in tape[:number]
                if merge["kind"] == "merged" and merge["fragment"] == fragment
                for part in merge["contributions"]
                if (part["island"], part["incarnation"])
                == (record["island"], record["incarnation"])
            ]
            open_steps = record["steps"] - max(ends, default=0)
            if lost > open_steps * BATCH * SEQUENCE:
                yield (
                    f"{record['island']} lost {lost} tokens of fragment {fragment}, "
                    f"with {open_steps} steps since its last merge"
                )


def lost_of(island: dict[str, Any]) -> dict[str, int]:
    """Return the lost tokens by reason, but for those that were open at the end."""
    return {why: n for why, n in island["tokens_lost"].items() if why != "stopped"}


def merged_after(tape: list[dict[str, Any]], name: str, time: float) -> bool:
    """Tell whether an island is in a merge after that time, before the last ones."""
    return any(
        part["island"] == name
        for record in tape
        if record["kind"] == "merged" and not record["final"] and record["time"] > time
        for part in record["contributions"]
    )


def last_life(tape: list[dict[str, Any]], name: str) -> int:
    """Return the highest incarnation that joined."""
    joined = [r for r in tape if r["kind"] == "joined" and r["island"] == name]
    return max(int(r["incarnation"]) for r in joined)


def latest(outcomes: Sequence[dict[str, Any]], field: str) -> float | None:
    """Return the largest value of the outcomes that have one."""
    return max((o[field] for o in outcomes if o[field] is not None), default=None)


def rows(cells: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield a row for each cell."""
    for name, cell in cells.items():
        case, _, phase = name.rpartition(": ")

        def seconds(field: str, cell: dict[str, Any] = cell) -> str:
            return "-" if cell[field] is None else f"{cell[field]:.1f}"

        told = cell.get("earlier", ())
        earlier = [t.partition(" beyond ")[0].removesuffix(" of its own") for t in told]
        yield {
            "case": case,
            "phase": phase,
            "gap, medians": f"{cell['gap_medians']:.2f}",
            "hiccup, s": f"{cell['hiccup_s']:.2f}",
            "lost": str(cell["tokens_lost"]),
            "merge after own steps": f"{cell['own_steps'] or 0:g}",
            "detected, s": seconds("detected_s"),
            "back, s": seconds("back_s"),
            "merged, s": seconds("merged_s"),
            "problems": "; ".join(cell["problems"]) or "none",
            "of earlier runs": "; ".join(earlier) or "none",
        }


def checks(cells: dict[str, Any]) -> list[support.Check]:
    """Return the bounds over all cells."""
    wrong = [f"{n}: {p}" for n, cell in cells.items() for p in cell["problems"]]
    gap = max((cell["gap_medians"] for cell in cells.values()), default=math.nan)
    own = [cell["own_steps"] for cell in cells.values()]
    again = "own steps of a killed island until it is merged again"
    steps = math.inf if None in own else max(own, default=math.nan)
    return [
        support.at_most("longest gap, medians", gap, GAP_MEDIANS_MAX, ".2f"),
        support.at_most(again, steps, CYCLE_STEPS, "g"),
        support.none_of("cells with a problem", wrong),
    ]


if __name__ == "__main__":
    support.script(main)
