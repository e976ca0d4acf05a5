"""A run under chaos, told by the dashboard's page alone.

Question: four islands and a coordinator train while every 20 s one of the five is
killed or stopped. Somebody who has nothing but the dashboard's address asks of every
kill why somebody failed, for how long, and what it cost. Are the answers those of the
list of faults?

The run's files are served without the list (`chaos.jsonl`), which the dashboard would
show. Chromium opens the page, and two of its tables are read as text: what failed, and
the islands. The list's answers are from the report of `diloco chaos`, and tokens from
the summary of the run. Both agree within 3 s, and within 5 % of tokens. A stop is
shorter than the time budget, and not asked for. The page may also list failures that
nobody injected: what a fault did to others, or nothing at all.

Prediction: nine of ten are answered as the list says.

Command: `python -m benchmarks.dashboard --minutes 60`. Cost: that, and a minute. With
`--folder` the run's files stay there; the run that is there is asked again.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import support
from soak import QUIET_S, START_S, soak_config

from diloco_jax import run_files
from diloco_jax.observability.tape import read_tape

TESTS = Path(__file__).resolve().parents[1] / "tests" / "dashboard"
NOT_SHOWN = (
    *(run_files.CHAOS, run_files.CHAOS_REPORT, run_files.CHAOS_PLOT),
    *(run_files.CACHE, run_files.LOGS),
)
"""Files of the workdir that tell of the faults, and folders that the page needs not."""
SHARE_AT_LEAST = 0.9
CELLS = """
[...document.querySelectorAll('#{table} tr')]
  .map(row => [...row.cells].map(cell => cell.innerText.trim()))
"""
DRAWN = "Number(document.body?.dataset.drawn) > 0"
COORDINATOR, DASH = "coordinator", "\N{EN DASH}"
WITHIN_S = 3.0
"""Seconds by which a time that the page says may be off: islands report every second or
two, and are back at the end of a first step."""
TOKENS_WITHIN = 0.05
WHY = "process ended"
"""Words that the page must have for the reason of a kill."""


class Row(NamedTuple):
    """A row of the page's table of failures."""

    when_s: float
    """Since the beginning of the run."""
    who: str
    seconds: float | None
    """None: it goes on."""
    why: str
    cost: str

    def merged_again_s(self) -> float | None:
        """Return the seconds after which it was merged again; None if no cell says."""
        told = re.search(r"merged again ([\d.:]+)", self.cost)
        return seconds_of(told[1]) if told else None

    def tokens_lost(self) -> float:
        """Return its tokens lost."""
        told = re.search(r"([\d,]+) tokens lost", self.cost)
        return count_of(told[1]) if told else 0.0

    def tells_of(self, fault: Mapping[str, Any], begun: float) -> bool:
        """Tell if it begins within seconds of a fault there."""
        return self.who == fault["who"] and near(self.when_s, fault["time"] - begun)


class Answer(NamedTuple):
    """A question, and the answers of the page and of the list of faults."""

    kind: str
    question: str
    page: Any
    listed: Any
    agree: bool


def main() -> int:
    """Run it; return 1 if fewer than nine of ten questions are answered."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=20.0)
    parser.add_argument("--schedule-seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder for the run, kept")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.every_s = 1.25, 10.0
    with tempfile.TemporaryDirectory(prefix="diloco-") as name:
        folder = Path(name)
        kept = options.folder or folder
        workdir = kept / "run"
        if not (workdir / run_files.CHAOS_REPORT).exists():
            kept.mkdir(parents=True, exist_ok=True)
            chaos_run(kept, 60 * options.minutes, options)
        report = json.loads((workdir / run_files.CHAOS_REPORT).read_bytes())
        summary = json.loads((workdir / run_files.SUMMARY).read_bytes())
        begun = next(iter(read_tape(workdir / run_files.TAPE)))["time"]
        failures, islands = page_of_run(workdir, folder)
    faults = report["outcomes"]
    every = list(answers(failures, islands, faults, report["tokens_lost"], begun))
    others = [
        row for row in failures if not any(row.tells_of(one, begun) for one in faults)
    ]
    asked = Counter(one.kind for one in every)
    answered = Counter(one.kind for one in every if one.agree)
    facts = {
        "begun": f"{datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC",
        "minutes": f"{summary['wall_seconds'] / 60:.1f}",
        "faults": len(faults),
        "of them asked for": sum(fault["kind"] == "kill" for fault in faults),
        "failures on the page": len(failures),
        "of them injected by nobody": len(others),
        "goodput": f"{report['goodput']:.3f}",
    }
    wrong = [one._asdict() for one in every if not one.agree]
    unasked = Counter(row.why for row in others).most_common()
    return support.deliver(
        options,
        "dashboard",
        __doc__,
        {
            "The run": [facts],
            "Every kill and island": [
                {"asked": kind, "times": times, "answered": answered[kind]}
                for kind, times in asked.items()
            ],
            "Answered otherwise than the list": wrong or [{"question": "none"}],
            "Failures on the page that nobody injected": [
                {"why": why, "times": times} for why, times in unasked
            ]
            or [{"why": "none"}],
        },
        [
            support.at_least(
                "share of questions answered",
                answered.total() / asked.total(),
                SHARE_AT_LEAST,
            )
        ],
        {"outcomes": faults, "page": [row._asdict() for row in failures]},
    )


def answers(
    failures: Sequence[Row],
    islands: Mapping[str, Mapping[str, str]],
    faults: Sequence[Mapping[str, Any]],
    tokens_lost: Mapping[str, int],
    begun: float,
) -> Iterator[Answer]:
    """Yield both answers to what is asked of each kill, as far as the list knows, and
    of the tokens that each island lost.

    failures, islands: of the page; a row by island, cell by head. faults, tokens_lost:
    of the report of `diloco chaos`. begun: of the run, in unix seconds.
    """
    for fault in faults:
        if fault["kind"] != "kill":
            continue
        who, at_s = fault["who"], fault["time"] - begun
        own = [row for row in failures if row.tells_of(fault, begun)]
        row = min(own, key=lambda row: abs(row.when_s - at_s), default=None)
        why = row.why if row else None
        yield Answer(
            "why, kill",
            f"Why did {who} fail at {at_s:.0f} s?",
            why,
            WHY,
            why is not None and WHY in why,
        )
        if who == COORDINATOR and fault["back_s"] is not None:
            lasted, back = row.seconds if row else None, fault["back_s"]
            yield Answer(
                "for how long, no coordinator",
                f"For how long was there no coordinator from {at_s:.0f} s on?",
                lasted,
                back,
                near(lasted, back),
            )
        elif who != COORDINATOR and fault["merged_s"] is not None:
            again, merged = row.merged_again_s() if row else None, fault["merged_s"]
            yield Answer(
                "merged again, kill",
                f"How long after {at_s:.0f} s was {who} merged again?",
                again,
                merged,
                near(again, merged),
            )
    for name, lost in sorted(tokens_lost.items()):
        rows = sum(row.tokens_lost() for row in failures if row.who == name)
        for kind, told in (
            ("tokens lost, in all", count_of(islands[name]["tokens lost"])),
            ("tokens lost, by row", rows),
        ):
            agree = abs(told - lost) <= TOKENS_WITHIN * lost
            yield Answer(kind, f"{name}: {kind}?", told, lost, agree)


def chaos_run(folder: Path, seconds: float, options: Any) -> support.Run:
    """Run four islands under random kills and stops, in `folder / "run"`."""
    flags = ["--every-s", options.every_s, "--for-s", seconds - QUIET_S]
    flags += ["--schedule-seed", options.schedule_seed]
    return support.run_in(
        soak_config(seconds),
        folder,
        2 * seconds + START_S,
        ["chaos", *map(str, flags)],
    )


def page_of_run(
    workdir: Path, folder: Path
) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Return the failures and the islands that the page of a run shows without its list
    of faults.

    folder: an empty one, for a copy and the browser's files."""
    sys.path.insert(0, str(TESTS))
    from browser import Browser
    from test_dashboard_app import start, stop

    shown = folder / "shown"
    shutil.copytree(workdir, shown, ignore=shutil.ignore_patterns(*NOT_SHOWN))
    process, port = start(shown)
    try:
        with Browser(folder / "profile") as browser:
            browser.open(f"http://localhost:{port}/", 1280, 900, "light")
            browser.wait(DRAWN)
            browser.wait("document.getElementById('notice').hidden")
            failures, islands = (
                browser.value(CELLS.format(table=table))
                for table in ("failures", "islands")
            )
    finally:
        stop(process)
        shutil.rmtree(folder / "profile", ignore_errors=True)
    return read_page(failures[1:], islands)


def read_page(
    failures: Sequence[Sequence[str]], islands: Sequence[Sequence[str]]
) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Return what the texts of two tables say. islands: the first row is the head."""
    rows = [
        Row(seconds_of(when), who, lasted_of(lasted), why, cost)
        for when, who, lasted, why, cost in failures
    ]
    head, *bodies = islands
    return rows, {
        body[0].partition(" ")[0]: dict(zip(head, body, strict=True)) for body in bodies
    }


def near(page: float | None, listed: float) -> bool:
    """Tell if two times agree."""
    return page is not None and abs(page - listed) <= WITHIN_S


def seconds_of(text: str) -> float:
    """Parse 1:02:03, 2:03 or 4.5 s."""
    found = 0.0
    for part in text.removesuffix(" s").split(":"):
        found = 60 * found + float(part)
    return found


def lasted_of(text: str) -> float | None:
    """Parse the cell of a duration."""
    if text == "until now":
        return None
    return 0.0 if text == DASH else seconds_of(text)


def count_of(text: str) -> float:
    """Parse 1,024 or 1.5 M."""
    number, _, unit = text.partition(" ")
    if number == DASH:
        return 0.0
    scale = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[unit]
    return scale * float(number.replace(",", ""))


if __name__ == "__main__":
    support.script(main)
