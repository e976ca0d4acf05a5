"""The check that asks the page about a run under chaos: it sees right and wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MINUTES_S = 900.0


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dashboard_questions

    return dashboard_questions


BEGUN = 1000.0
ENDED = "its process ended without a word: killed, crashed, or its machine is gone"
OUTCOMES = [
    {"who": "a", "kind": "kill", "time": 1030.0, "seconds": 0.0},
    {"who": "b", "kind": "stop", "time": 1050.0, "seconds": 2.0},
    {"who": "b", "kind": "stop", "time": 1070.0, "seconds": 5.0},
    {"who": "coordinator", "kind": "kill", "time": 1090.0, "seconds": 0.0},
]
BACK = [{"back_s": 4.0, "merged_s": 9.0}, *[{"back_s": None, "merged_s": None}] * 2]
LIST = [one | back for one, back in zip(OUTCOMES, [*BACK, BACK[0]], strict=True)]
FAILURES = [
    ["1:30", "coordinator", "5.1 s", f"{ENDED}", "merges went on 9.2 s after"],
    ["1:10", "b", "6.2 s", "its process stood still, and made no step", "nothing"],
    ["0:31", "a", "6.0 s", ENDED, "512 tokens lost, merged again 9.4 s after it"],
]
ISLANDS = [["island", "tokens lost"], ["a #2", "512"], ["b", "1,024"]]
LOST = {"a": 512, "b": 1024}


def agreed(asked, failures, islands=ISLANDS, lost=LOST) -> list[bool]:
    truth = asked.truth_of(LIST, lost, BEGUN)
    page = asked.page_of(failures, islands)
    return [
        bool(question.agree(question.of_page(page), question.of_list(truth)))
        for question in asked.questions(truth, 0)
    ]


def test_a_page_that_says_it_all_answers_all(asked):
    assert agreed(asked, FAILURES) == [True] * 10


def test_a_page_that_says_another_time_reason_or_name_does_not(asked):
    late = [["2:30", *FAILURES[0][1:]], FAILURES[1], ["0:41", *FAILURES[2][1:]]]
    assert sum(agreed(asked, late)) <= 5
    vague = [[*row[:3], "something", row[4]] for row in FAILURES]
    assert sum(agreed(asked, vague)) <= 4
    assert sum(agreed(asked, [])) <= 1
    assert sum(agreed(asked, FAILURES, lost={"a": 900, "b": 9000})) == 9


def test_a_list_without_some_kind_of_fault_is_refused(asked):
    truth = asked.truth_of(LIST[:2], LOST, BEGUN)
    with pytest.raises(ValueError, match="give another seed"):
        asked.questions(truth, 0)


@pytest.mark.nightly
def test_nine_of_ten_questions_about_a_run_under_chaos_are_answered():
    command = [sys.executable, "dashboard.py", "--quick", "--json"]
    done = subprocess.run(
        command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=MINUTES_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checks"][0]["holds"]
