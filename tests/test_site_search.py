"""The search of the site answers questions: each has a page that answers it among the
first three results. `.ci/run` runs this on the site that it has built."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SITE = os.environ.get("DILOCO_SITE", "")
SHOWN = 3


class Question(NamedTuple):
    asks: str
    typed: str
    """Words that a reader types into the search."""
    answered_by: str
    """Page that answers it, as the site names it."""


QUESTIONS = [
    Question("How do I install it?", "install", "docs/start"),
    Question(
        "How do I run it on several machines?", "several machines", "docs/running"
    ),
    Question("Which exit codes mean: start again?", "exit codes", "docs/running"),
    Question(
        "The coordinator lost its disk. What now?", "lost disk", "docs/checkpoints"
    ),
    Question("How do I go on after Ctrl-C?", "stop go on", "docs/checkpoints"),
    Question("Why is an island slow?", "slow island", "docs/watching"),
    Question("What does this alert mean?", "alerts", "docs/alerts"),
    Question("Why were tokens lost?", "tokens lost", "docs/metrics"),
    Question("How do I renew a certificate?", "renew certificate", "docs/security"),
    Question("Which ports must be open?", "ports firewall", "docs/security"),
    Question("How do I export weights?", "export weights", "docs/weights"),
    Question("How do I train on Parquet?", "parquet", "docs/data"),
    Question("How do I train a model of my own?", "own model", "docs/models"),
    Question("How do I keep my train loop?", "own train loop", "docs/embed"),
    Question("How do I write a merge rule?", "own merge rule", "docs/extending"),
    Question("Does it fit my slices?", "does it fit", "docs/planning"),
    Question("What if a Spot slice is preempted?", "preempted slice", "docs/cloud"),
    Question("How do I repeat a run?", "repeat run bit", "docs/replay"),
    Question("What does quorum mean?", "quorum", "docs/design/words"),
    Question("What does sync.grace do?", "sync.grace", "reference/configuration"),
    Question("What is in a Hello?", "hello message", "reference/wire"),
    Question("How is the tape written?", "tape format", "reference/tape"),
    Question("What differs from the paper?", "paper", "docs/paper"),
    Question("How much bandwidth does it need?", "bandwidth", "docs/results/goodput"),
    Question("How do I fine-tune?", "fine-tune", "docs/finetune"),
]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[str]]]:
    """The results of every question, best first: page, title, anchor."""
    if not SITE:
        pytest.skip("DILOCO_SITE names no site that was built")
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed, which runs the site's search")
    found = subprocess.run(
        [node, str(ROOT / "tests" / "site_search.mjs"), SITE],
        input=json.dumps([question.typed for question in QUESTIONS]),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(zip([q.asks for q in QUESTIONS], json.loads(found.stdout), strict=True))


def test_there_are_as_many_questions_as_promised():
    assert len({question.typed for question in QUESTIONS}) >= 20


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.asks)
def test_the_answer_is_among_the_first_three(question, answers):
    shown = [page for page, _, _ in answers[question.asks][:SHOWN]]
    assert question.answered_by in shown, answers[question.asks][:12]
