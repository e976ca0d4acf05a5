"""The dashboard for Grafana, and what its tests need beside Python."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

FOLDER = Path(__file__).parents[2] / "launch" / "grafana"
REQUIRED = "DILOCO_PROMETHEUS_TESTS"
"""Variable that is set where a test that lacks something fails, as in `.ci/run`."""


class Asked(NamedTuple):
    """A query of the dashboard."""

    panel: str
    expr: str


def missing(what: str, remedy: str) -> NoReturn:
    """Skip the test, or fail it, since something is not installed."""
    text = f"{what} is missing: {remedy}"
    if os.environ.get(REQUIRED):
        pytest.fail(text)
    pytest.skip(text)


def queries() -> Iterator[Asked]:
    """All queries of the committed dashboard."""
    board = json.loads((FOLDER / "diloco.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets") or ():
            yield Asked(panel["title"], target["expr"])
