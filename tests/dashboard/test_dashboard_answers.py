"""The check that asks the page about a run under chaos: it sees right and wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from browser import find_chromium

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MINUTES_S = 900.0


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dashboard

    return dashboard


BEGUN = 1000.0
ENDED = "its process ended without a word: killed, crashed, or its machine is gone"
OUTCOMES = [
    {"who": "a", "kind": "kill", "time": 1030.0, "seconds": 0.0},
    {"who": "b", "kind": "stop", "time": 1050.0, "seconds": 2.0},
    {"who": "b", "kind": "kill", "time": 1070.0, "seconds": 0.0},
    {"who": "coordinator", "kind": "kill", "time": 1090.0, "seconds": 0.0},
]
BACK = [{"back_s": 4.0, "merged_s": 9.0}, *[{"back_s": None, "merged_s": None}] * 2]
LIST = [one | back for one, back in zip(OUTCOMES, [*BACK, BACK[0]], strict=True)]
FAILURES = [
    ["1:30", "coordinator", "5.1 s", f"{ENDED}", "merges went on 9.2 s after"],
    ["1:10", "b", "6.2 s", ENDED, "1,024 tokens lost"],
    ["0:31", "a", "6.0 s", ENDED, "512 tokens lost, merged again 9.4 s after it"],
]
ISLANDS = [["island", "tokens lost"], ["a #2", "512"], ["b", "1,024"]]
LOST = {"a": 512, "b": 1024}


def disputed(asked, failures) -> list[str]:
    """Kinds of questions that the page answers otherwise than the list."""
    rows, islands = asked.read_page(failures, ISLANDS)
    found = list(asked.answers(rows, islands, LIST, LOST, BEGUN))
    assert len(found) == 9
    return [one.kind for one in found if not one.agree]


def test_a_page_that_says_it_all_answers_all(asked):
    assert disputed(asked, FAILURES) == []


@pytest.mark.parametrize(
    ("row", "cell", "text", "kind"),
    [
        (0, 2, "9.5 s", "for how long, no coordinator"),
        (1, 3, "its connection broke", "why, kill"),
        (2, 4, "1,512 tokens lost, merged again 9.4 s after it", "tokens lost, by row"),
        (2, 4, "512 tokens lost", "merged again, kill"),
    ],
)
def test_every_fault_is_asked_for(asked, row, cell, text, kind):
    told = [list(row) for row in FAILURES]
    told[row][cell] = text
    assert disputed(asked, told) == [kind]


@pytest.mark.nightly
def test_questions_about_a_run_under_chaos_are_answered():
    find_chromium()  # Not only once the run is over.
    command = [sys.executable, "dashboard.py", "--quick", "--json"]
    done = subprocess.run(
        command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=MINUTES_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checks"][0]["holds"]
