"""An hour under chaos, told by the dashboard's page alone.

Question: four islands and a coordinator train while every 20 s one of the five is
killed or stopped. Somebody who has nothing but the dashboard's address asks which
island failed when, why, and what it cost. Are the answers those of the list of faults?

The run's files are served without the list (`chaos.jsonl`), which the dashboard would
show. Chromium opens the page, and two of its tables are read as text: what failed, and
the islands. `benchmarks/dashboard_questions.py` has the ten questions, with how either
side answers and when both agree: times within 3 s, tokens within 5 %. Stops shorter
than 4 s are not asked for.

Prediction: nine of ten are answered as the list says.

Command: `python -m benchmarks.dashboard --minutes 60`. Cost: that, and a minute.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import support
from dashboard_questions import Page, page_of, questions, truth_of
from soak import QUIET_S, START_S, soak_config

from diloco_jax import run_files

TESTS = Path(__file__).resolve().parents[1] / "tests" / "dashboard"
OF_LIST = (run_files.CHAOS, run_files.CHAOS_REPORT, run_files.CHAOS_PLOT)
"""Files of the workdir that tell of the faults."""
AT_LEAST = 9
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
    options = parser.parse_args()
    if options.quick:
        options.minutes = 4.0
    with tempfile.TemporaryDirectory(prefix="diloco-") as name:
        folder = Path(name)
        run = chaos_run(folder, 60 * options.minutes, options)
        report = json.loads((run.workdir / run_files.CHAOS_REPORT).read_bytes())
        page = page_of_run(run.workdir, folder)
    begun = run.tape[0]["time"]
    truth = truth_of(report["outcomes"], report["tokens_lost"], begun)
    rows = [
        {
            "question": question.text,
            "the page": told(found := question.of_page(page)),
            "the list": told(wanted := question.of_list(truth)),
            "agree": "yes" if question.agree(found, wanted) else "**no**",
        }
        for question in questions(truth, options.schedule_seed)
    ]
    agree = sum(row["agree"] == "yes" for row in rows)
    facts = {
        "faults": len(report["outcomes"]),
        "of them asked for": len(truth.faults),
        "failures on the page": len(page.failures),
        "goodput": f"{report['goodput']:.3f}",
    }
    return support.deliver(
        options,
        "dashboard",
        __doc__,
        {"The run": [facts], "Questions": rows},
        [support.at_least("questions answered, of ten", agree, AT_LEAST, ".0f")],
        {
            "outcomes": report["outcomes"],
            "page": [row._asdict() for row in page.failures],
        },
    )


def chaos_run(folder: Path, seconds: float, options: Any) -> support.Run:
    """Run four islands under random kills and stops."""
    flags = ["--every-s", options.every_s, "--for-s", seconds - QUIET_S]
    flags += ["--schedule-seed", options.schedule_seed]
    return support.run_in(
        soak_config(seconds),
        folder,
        2 * seconds + START_S,
        ["chaos", *map(str, flags)],
    )


def page_of_run(workdir: Path, folder: Path) -> Page:
    """Return what the page of a run says, which is shown without its list of faults."""
    sys.path.insert(0, str(TESTS))
    from browser import Browser
    from test_dashboard_app import start, stop

    for name in OF_LIST:
        (workdir / name).unlink(missing_ok=True)
    process, port = start(workdir)
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
    sys.exit(main())
