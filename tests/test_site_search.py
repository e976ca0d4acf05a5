"""The search of the site answers questions: each has a page that answers it among the
first three results. `.ci/run` runs this on the site that it has built."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = os.environ.get("DILOCO_SITE", "")
SHOWN = 3


ANSWERED_BY = {
    "install": "docs/start",
    "several machines": "docs/running",
    "exit codes": "docs/running",
    "lost disk": "docs/checkpoints",
    "stop go on": "docs/checkpoints",
    "slow island": "docs/watching",
    "alerts": "docs/alerts",
    "tokens lost": "docs/metrics",
    "renew certificate": "docs/security",
    "ports firewall": "docs/security",
    "export weights": "docs/weights",
    "parquet": "docs/data",
    "own model": "docs/models",
    "own train loop": "docs/embed",
    "own merge rule": "docs/extending",
    "does it fit": "docs/planning",
    "preempted slice": "docs/cloud",
    "repeat run bit": "docs/replay",
    "quorum": "docs/design/words",
    "sync.grace": "reference/configuration",
    "hello message": "reference/wire",
    "tape format": "reference/tape",
    "paper": "docs/paper",
    "bandwidth": "docs/results/goodput",
    "fine-tune": "docs/finetune",
}
"""Page, as the site names it, that answers what a reader types into the search."""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[str]]]:
    """The results of every question, best first: page, title, anchor."""
    if not SITE:
        pytest.skip("DILOCO_SITE names no site that was built")
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed, which runs the site's search")
    found = subprocess.run(
        [node, str(ROOT / "tests" / "site_search.mjs"), SITE],
        input=json.dumps([*ANSWERED_BY]),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(zip(ANSWERED_BY, json.loads(found.stdout), strict=True))


def test_there_are_as_many_questions_as_promised():
    assert len(ANSWERED_BY) >= 20


@pytest.mark.parametrize("typed", ANSWERED_BY)
def test_the_answer_is_among_the_first_three(typed, answers):
    shown = [page for page, _, _ in answers[typed][:SHOWN]]
    assert ANSWERED_BY[typed] in shown, answers[typed][:12]
