"""A run under chaos, told by the dashboard's page alone.

Question: four islands and a coordinator train while every 20 s one of the five is
killed or stopped. Somebody who has nothing but the dashboard's address asks which
island failed when, why, and what it cost. Are the answers those of the list of faults?

The run's files are served without the list (`chaos.jsonl`), which the dashboard would
show. Chromium opens the page, and two of its tables are read as text: what failed, and
the islands. The list's answers are from the report of `diloco chaos`, and tokens from
the summary of the run. `benchmarks/dashboard_questions.py` has the questions, with how
either side answers and when both agree: times within 3 s, tokens within 5 %. A stop
is shorter than the time budget, and not asked for.

Ten questions are drawn, as somebody would ask them. Then the same is asked of every
fault and every island. The page may also list failures that nobody injected: what a
fault did to others, or nothing at all.

Prediction: nine of ten are answered as the list says, of those drawn and of all.

Command: `python -m benchmarks.dashboard --minutes 60`. Cost: that, and a minute. With
`--folder` the run's files stay there; the run that is there is asked again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import support
from dashboard_questions import (
    Page,
    Question,
    about,
    of_tokens,
    page_of,
    questions,
    truth_of,
    unexplained,
)
from soak import QUIET_S, START_S, soak_config

from diloco_jax import run_files
from diloco_jax.observability.tape import read_tape

TESTS = Path(__file__).resolve().parents[1] / "tests" / "dashboard"
NOT_SHOWN = (
    *(run_files.CHAOS, run_files.CHAOS_REPORT, run_files.CHAOS_PLOT),
    *(run_files.CACHE, run_files.LOGS),
)
"""Files of the workdir that tell of the faults, and folders that the page needs not."""
AT_LEAST, SHARE_AT_LEAST = 9, 0.9
CELLS = """
[...document.querySelectorAll('#{table} tr')]
  .map(row => [...row.cells].map(cell => cell.innerText.trim()))
"""
DRAWN = "Number(document.body?.dataset.drawn) > 0"


def main() -> int:
    """Run it; return 1 if fewer than nine questions are answered."""
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
        page = page_of_run(workdir, folder)
    truth = truth_of(report["outcomes"], report["tokens_lost"], begun)
    ten = questions(truth, options.schedule_seed)
    every = [one for fault in truth.kills for one in about(fault)]
    every += of_tokens(truth)
    agree = sum(one.is_answered(page) for one in ten)
    agree_of_all = sum(one.is_answered(page) for one in every) / len(every)
    others = unexplained(page, truth)
    facts = {
        "begun": f"{datetime.fromtimestamp(begun, UTC):%Y-%m-%d %H:%M} UTC",
        "minutes": f"{summary['wall_seconds'] / 60:.1f}",
        "faults": len(truth.all),
        "of them asked for": len(truth.kills),
        "failures on the page": len(page.failures),
        "of them injected by nobody": len(others),
        "goodput": f"{report['goodput']:.3f}",
    }
    return support.deliver(
        options,
        "dashboard",
        __doc__,
        {
            "The run": [facts],
            "Ten questions": [row_of(one, page) for one in ten],
            "Every fault and island": list(shares(every, page)),
            "Answered otherwise than the list": [
                row_of(one, page) for one in every if not one.is_answered(page)
            ]
            or [{"question": "none"}],
            "Failures on the page that nobody injected": [
                {"why": why, "times": times}
                for why, times in Counter(row.why for row in others).most_common()
            ]
            or [{"why": "none"}],
        },
        [
            support.at_least("questions answered, of ten", agree, AT_LEAST, ".0f"),
            support.at_least("share answered, of all", agree_of_all, SHARE_AT_LEAST),
        ],
        {
            "outcomes": report["outcomes"],
            "page": [row._asdict() for row in page.failures],
        },
    )


def row_of(one: Question, page: Page) -> dict[str, str]:
    """Return a question with both answers."""
    return {
        "question": one.text,
        "the page": told(one.of_page(page)),
        "the list": told(one.answer),
        "agree": "yes" if one.is_answered(page) else "**no**",
    }


def shares(every: Sequence[Question], page: Page) -> Iterator[dict[str, Any]]:
    """Yield how many questions of each kind are answered as the list says."""
    for kind in dict.fromkeys(one.kind for one in every):
        asked = [one for one in every if one.kind == kind]
        answered = sum(one.is_answered(page) for one in asked)
        yield {"asked": kind, "times": len(asked), "answered": answered}


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


def page_of_run(workdir: Path, folder: Path) -> Page:
    """Return what the page of a run says, which is shown without its list of faults.

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
    return page_of(failures[1:], islands)


def told(answer: Any) -> str:
    """Return an answer for people."""
    if isinstance(answer, float):
        return f"{answer:.1f}"
    if isinstance(answer, int):
        return f"{answer:,}"
    if isinstance(answer, set | tuple | list):
        return ", ".join(map(told, sorted(answer, key=str)))
    return "nothing" if answer in (None, "") else str(answer)


if __name__ == "__main__":
    support.script(main)
